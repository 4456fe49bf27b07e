"""Trains small.tiktoken: byte-pair ranks over texts of this repository, cut by Kimi's pattern.

    python tests/data/kimi/train_ranks.py README.md docs/*.md > tests/data/kimi/small.tiktoken

The committed file was made from the documentation of commit 2785a06 and the sentence below. Ties
go to the pair that was seen first, so equal texts give equal ranks.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import regex

from engine.chat.kimi_tokenizer import SPLIT_PATTERN

NUM_RANKS = 1024
CHINESE = "你好，世界。请读取这个城市的天气，然后回答问题。" * 20
# the pattern's set difference is spelled && in Rust and needs VERSION1 here
CUT = regex.compile(SPLIT_PATTERN, regex.VERSION1)


def train(text: str, num_ranks: int = NUM_RANKS) -> list[bytes]:
    """Tokens in the order of their ranks: the 256 bytes, then the merges."""
    words = Counter(piece.encode() for piece in CUT.findall(text))
    split = {word: [word[i : i + 1] for i in range(len(word))] for word in words}
    tokens = [bytes([value]) for value in range(256)]
    while len(tokens) < num_ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        (left, right), _ = pairs.most_common(1)[0]
        tokens.append(left + right)
        for parts in split.values():
            at = 0
            while at < len(parts) - 1:
                if parts[at] == left and parts[at + 1] == right:
                    parts[at : at + 2] = [left + right]
                at += 1
    return tokens


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    for rank, token in enumerate(train("\n".join([*texts, CHINESE]))):
        sys.stdout.write(f"{base64.b64encode(token).decode()} {rank}\n")
