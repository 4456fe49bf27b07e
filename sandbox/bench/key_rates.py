"""How often key matching is right and wrong: ``python -m sandbox.bench.key_rates FILES...``.

FILES are JSON lines whose rows hold ``function`` (a list of {name, parameters}), the format of the
Berkeley Function Calling Leaderboard, or JSON lines of such functions. For each distinct tool:

- unrelated: names of other tools' parameters, of which a match is wrong;
- one or two random edits of a key of its own, right if it finds its way back;
- styles of a key (camel, upper, kebab, title), which must all be right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from sandbox.calls.keys import KeyMatcher
from sandbox.calls.policy import KeyTier
from sandbox.calls.words import style_form, tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def load_tools(files: list[Path]) -> list[tuple[str, ...]]:
    """Property names of every distinct tool."""
    tools = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line) if line.startswith("{") else {}
            functions = row.get("function", [row] if "parameters" in row else [])
            for function in functions if isinstance(functions, list) else [functions]:
                names = tuple(function.get("parameters", {}).get("properties", {}))
                if names:
                    tools[function["name"], names] = names
    return list(tools.values())


def edited(name: str, count: int, random: Random) -> str:
    """``name`` after ``count`` random insertions, deletions, replacements or swaps of letters."""
    text = name
    for _ in range(count):
        at = random.randrange(len(text)) if text else 0
        match random.randrange(4):
            case 0:
                text = text[:at] + random.choice(LETTERS) + text[at:]
            case 1:
                text = text[:at] + text[at + 1 :]
            case 2:
                text = text[:at] + random.choice(LETTERS) + text[at + 1 :]
            case 3:
                text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    return text


def styles(name: str) -> Iterator[str]:
    """The name in other styles."""
    parts = tokens(name)
    yield "".join(part if not i else part.title() for i, part in enumerate(parts))
    yield name.upper()
    yield "-".join(parts)
    yield "_".join(part.title() for part in parts)


def found(key: str, names: tuple[str, ...], words: frozenset[str], tier: KeyTier) -> str | None:
    """The property that ``key`` alone is taken for."""
    match = KeyMatcher(tier, words=words).match({key: None}, names)
    return match.renamed[key][0] if match is not None and key in match.renamed else None


def rates(tools: list[tuple[str, ...]], num_unrelated: int, seed: int) -> Counter[Any]:
    """Counts by (kind, what came out)."""
    random = Random(seed)
    every = sorted({name for names in tools for name in names})
    counts: Counter[Any] = Counter()
    for names in tools:
        words = frozenset(token for name in names for token in (*tokens(name), style_form(name)))
        forms = {style_form(name) for name in names}
        for other in random.sample(every, min(num_unrelated, len(every))):
            if style_form(other) in forms:
                continue
            taken = found(other, names, words, KeyTier.FUZZY)
            by_alias = taken is not None and found(other, names, words, KeyTier.ALIAS) is not None
            outcome = "alias" if by_alias else "typo" if taken is not None else "none"
            counts["unrelated", outcome] += 1
        for name in names:
            for kind, key in (
                ("one edit", edited(name, 1, random)),
                ("two edits", edited(name, 2, random)),
                *(("style", key) for key in styles(name)),
            ):
                if key in names or not key:
                    continue
                taken = found(key, names, words, KeyTier.FUZZY)
                outcome = "none" if taken is None else "right" if taken == name else "wrong"
                counts[kind, outcome] += 1
    return counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--unrelated", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tools = load_tools(options.files)
    counts = rates(tools, options.unrelated, options.seed)
    sys.stdout.write(f"{len(tools)} tools, {len({n for t in tools for n in t})} names\n")
    for kind in ("unrelated", "one edit", "two edits", "style"):
        total = sum(count for (of, _), count in counts.items() if of == kind)
        shares = ", ".join(
            f"{outcome} {100 * count / total:.3f} %"
            for (of, outcome), count in sorted(counts.items())
            if of == kind
        )
        sys.stdout.write(f"{kind:<10} n={total:<8} {shares}\n")


if __name__ == "__main__":
    main()
