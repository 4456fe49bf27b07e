"""D7: loops in what the policy writes, where no tool is called. Pure; the rollout calls them.

``repeated_suffix`` is for the ids sampled so far in a turn: an engine that streams stops sampling
when it answers, others are asked after the step, before the turn is trained on or continued.
``repeated_turns`` is for assistant turns without calls in dialogues that go on after one.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

MAX_PERIOD = 64
TIMES = 8
NUM_TURNS = 3
NEAR_EQUAL = 0.85
_FENCE = re.compile(r"^[ \t]{0,3}(?:```|~~~)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z0-9]+|[^\W\d_]")


def repeated_suffix(
    ids: Sequence[int],
    *,
    text: str | None = None,
    max_period: int = MAX_PERIOD,
    times: int = TIMES,
) -> int | None:
    """Smallest period of at most ``max_period`` tokens whose last ``times`` repetitions end
    ``ids``, or None. ``text``: what the ids spell; inside an open code fence nothing is a loop
    (tables and data repeat). O(max_period) for text that does not repeat."""
    for period in range(1, max_period + 1):
        length = period * times
        if length > len(ids):
            break
        if ids[-1] != ids[-1 - period]:
            continue
        begin = len(ids) - length
        if all(ids[i] == ids[i + period] for i in range(begin, len(ids) - period)):
            return None if text is not None and in_code_fence(text) else period
    return None


def in_code_fence(text: str) -> bool:
    """Whether ``text`` ends inside a code fence that is still open."""
    return len(_FENCE.findall(text)) % 2 == 1


def repeated_turns(texts: Sequence[str], num_turns: int = NUM_TURNS) -> bool:
    """Whether the last ``num_turns`` assistant turns without calls say nearly the same.

    Near-equal: without case, width and punctuation, the multisets of three words in a row share at
    least 85 % (Dice). Linear in the length of the texts.
    """
    if len(texts) < num_turns:
        return False
    last = [_shingles(text) for text in texts[-num_turns:]]
    return all(_share(last[-1], other) >= NEAR_EQUAL for other in last[:-1])


def _shingles(text: str) -> Counter[tuple[str, ...]]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    if len(words) < 3:
        return Counter([tuple(words)])
    return Counter(zip(words, words[1:], words[2:], strict=False))


def _share(one: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> float:
    return 2 * (one & other).total() / (one.total() + other.total())
