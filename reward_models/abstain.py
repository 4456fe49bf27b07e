"""Is an answer no answer? "I cannot determine this" in the languages our tasks are written in.

Under a 0/1 budget an over-long correct answer is worth what "cannot determine" is worth, so giving
up becomes free (facts/sft-rewards.md 3.5). Giving up counts as wrong, for the reward and for the
gate, unless the task says that it cannot be answered.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 240
"""A longer text that says somewhere that it is not sure is an answer all the same."""

_NOT = "|".join(
    [
        r"(?:can|could) ?not",
        r"(?:can|couldn)['\u2019]?t",
        r"(?:not able|unable) to",
        r"(?:not possible|impossible) to",
        r"not have enough \w+ to",
    ]
)
_ENGLISH = [
    rf"\b(?:{_NOT}) (?:\w+ ){{0,3}}(?:answer|determin|say|tell|know|find|comput|calculat)",
    r"\bi (?:do not|don['\u2019]?t) (?:really )?know\b",
    r"\bi have no idea\b",
    r"\b(?:not enough|insufficient|too little|lack of) (?:information|data|context|evidence)\b",
    r"\bno (?:answer|solution) (?:is )?(?:possible|available|found)\b",
]
_CHINESE = [
    r"(?:无法|不能|没法|难以|没办法)(?:准确|直接|完全)?(?:确定|判断|回答|得出|得知|作答|给出|计算|解答)",
    r"(?:我|本人)?不(?:知道|清楚|确定|太清楚)",
    r"(?:信息|数据|资料|条件)(?:不足|不够|有限|缺失)",
]
_BARE = re.compile(
    r"(?:unknown|undetermined|indeterminate|n/?a|none|no answer|unsure|not sure|skip|pass|idk"
    r"|未知|不详|无答案|无解答|无)?",
    re.IGNORECASE,
)
_PATTERN = re.compile("|".join([*_ENGLISH, *_CHINESE]), re.IGNORECASE)
_EDGE = " \t\r\n.,;:!?\"'()[]{}*_`<>\u3002\uff0c\uff1b\uff1a\uff01\uff1f\u201c\u201d\u2018\u2019"


def gives_up(final_text: str) -> bool:
    """True for a short text that says it has no answer.

    "The value of x is unknown at first; x = 4" is short and names a value: digits after the
    phrase make it an answer.
    """
    text = _plain(final_text)
    if len(text) > MAX_CHARS:
        return False
    found = _PATTERN.search(text)
    return found is not None and not any(c.isdigit() for c in text[found.end() :])


def says_nothing(final_text: str) -> bool:
    """True for nothing at all and for a bare "none" or "unknown". Where the work is in the files,
    or nothing is what was to be found, that may be right: ask the verifier."""
    return _BARE.fullmatch(_plain(final_text)) is not None


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip(_EDGE)
