"""When two calls are the same call, and two results the same result."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection
from typing import Any

_EMPTY = frozenset(
    ("", "[]", "{}", "null", "none", "()", '""', "no match", "no matches", "not found", "empty")
)
_NO_RESULTS = re.compile(
    r"(?:0|no|zero) (?:results?|match(?:es)?|items?|rows?|entries|records|data|hits?)"
    r"(?: (?:were )?found)?[.!]?\Z"
    r"|nothing (?:was )?found[.!]?\Z"
    r"|(?:没有|无|未找到|找不到)(?:任何)?(?:结果|数据|记录|匹配)?(?:项)?[。!！]?\Z"
)
_INFRA = re.compile(
    r"(?:tool_error: )?(?:HTTP(?:/[\d.]+)?(?: error| status)? ?(?:429|5\d\d)\b|(?:429|5\d\d) [A-Z]"
    r"|rate limit|too many requests|service unavailable|bad gateway|gateway time-?out"
    r"|connection (?:reset|refused|aborted|timed out)|(?:connect|read) time(?:d )?-?out"
    r"|upstream (?:timed out|unavailable))",
    re.IGNORECASE,
)
_VOLATILE = re.compile(
    r"(?P<uuid>\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b)"
    r"|(?P<stamp>\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)"
    r"|(?P<clock>\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b)"
    r"|(?P<address>\b0x[0-9a-fA-F]+\b)"
    r"|(?P<hex>\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b)"
    r"|(?P<duration>\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|sec|secs|seconds?|min|minutes?)\b)"
    r"|(?P<pid>\b(?:pid|PID)[ =:]*\d+\b)"
)


def call_key(tool: str, arguments: dict[str, Any], ignored: Collection[str] = ()) -> str:
    """Canonical text of a call: sorted keys, NFKC, 2.0 == 2; without the ``ignored`` keys."""
    kept = {key: value for key, value in arguments.items() if key not in ignored}
    return tool + _dumped(canonical(kept))


def result_key(result: Any, ignored: Collection[str] = ()) -> str:
    """Canonical text of a result: without ``ignored`` keys (at any depth), with UUIDs, time stamps,
    addresses, hex ids, durations and pids masked and white space folded."""
    if ignored and isinstance(result, str):
        result = _parsed(result)
    if not isinstance(result, str):
        result = _dumped(canonical(_without(result, ignored)))
    masked = _VOLATILE.sub(
        lambda match: f"<{match.lastgroup}>", unicodedata.normalize("NFKC", result)
    )
    return " ".join(masked.split())


def is_no_information(key: str) -> bool:
    """Whether a result (its ``result_key``) says nothing: empty, null, "no results"."""
    text = key.casefold()
    return text in _EMPTY or (len(text) < 64 and _NO_RESULTS.match(text) is not None)


def is_infra_error(message: str) -> bool:
    """Whether an error message begins like one of the tool's upstream: 429, 5xx, reset, time-out.

    Only its beginning counts: what a tool echoes further on may be the policy's own words.
    """
    return _INFRA.match(message) is not None


def canonical(value: Any) -> Any:
    """Equal for values that a tool cannot tell apart: NFKC strings, 2.0 as 2."""
    if isinstance(value, dict):
        return {unicodedata.normalize("NFKC", key): canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, str):
        return unicodedata.normalize("NFKC", value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _parsed(text: str) -> Any:
    """The JSON value of ``text``; plain text, which has no keys to ignore, as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without(value: Any, ignored: Collection[str]) -> Any:
    if not ignored:
        return value
    if isinstance(value, dict):
        return {k: _without(item, ignored) for k, item in value.items() if k not in ignored}
    if isinstance(value, list):
        return [_without(item, ignored) for item in value]
    return value


def _dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
