"""Canonical JSON of arguments and requests, and the keys made of it. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, 2.0 written as 2; equal values give equal text.

    Text is left as it is: two spellings that an upstream may tell apart are two requests.
    ValueError for NaN and infinity.
    """
    return json.dumps(
        _canonical(value),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def digest(value: Any) -> str:
    """sha256 (64 hex digits) of the canonical JSON."""
    text = canonical_json(value).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


def idempotency_key(
    secret: bytes, episode: str, call_index: int, tool: str, arguments: dict[str, Any]
) -> str:
    """HMAC-SHA256 (64 hex digits) over episode, call index, tool and canonical arguments.

    Equal for a repeated delivery of one call, different for any two calls of an episode
    (facts/sandboxes.md 2, point 4).
    """
    message = canonical_json([episode, call_index, tool, arguments])
    data = message.encode("utf-8", "surrogatepass")
    return hmac.new(secret, data, hashlib.sha256).hexdigest()


def next_state(state: str, request_key: str) -> str:
    """State token after a call that may have changed the world; a fold over such calls."""
    return hashlib.sha256(f"{state}:{request_key}".encode()).hexdigest()[:32]


START_STATE = "0"
