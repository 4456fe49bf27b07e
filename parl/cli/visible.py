"""Text of models and tools on a terminal: nothing in it may move the cursor or fail to encode."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Control characters (but tab and newline), bidi overrides and surrogates as ``\x1b``."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
