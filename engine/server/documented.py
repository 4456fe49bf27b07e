"""What the OpenAPI document says of answers that are not the plain 200."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from engine.server.answers import ErrorBody
from engine.server.streams import EVENT_STREAM

_WORDS = {
    400: "A parameter is wrong; error.param names it.",
    401: "No valid API key.",
    404: "Another model, or no such route.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests, or no room now; see Retry-After.",
    500: "A bug of the server.",
    503: "Weights are being loaded, the server drains, or the engine was lost.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of the errors that a route may answer."""
    return {status: {"model": ErrorBody, "description": _WORDS[status]} for status in statuses}


def streamed(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A 200 that is JSON, or events where the request says stream."""
    # of one event
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {EVENT_STREAM: {"schema": event}}
    return {200: {"model": model, "content": events, "description": "The answer."}}
