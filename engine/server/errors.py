"""What the server refuses, in OpenAI's words.

ApiError
├── BadRequest        400  a parameter; ``param`` names it
├── Unauthorized      401  no valid API key
├── ModelNotFound     404  another model was asked for
├── NotFound          404  no such route
├── TooLarge          413  the body
├── BodyTimeout       408  the body did not arrive
├── Busy              429  too many requests at once
└── NotReady          503  weights are being loaded, or the server drains

Errors of the engine become one of these answers in ``answer_to``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.errors import (
    CapacityError,
    ChatError,
    ConstraintError,
    ContextLost,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidStateError,
    NotSupportedError,
    RateLimited,
    TryAgainLater,
    WeightsError,
)
from infra.errors import ConfigError, ParlError

SERVER_RETRY_S = 2.0


class ApiError(EngineError):
    """Base class; status and words of the answer."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class BadRequest(ApiError):
    """``param``: dotted name of what is wrong."""

    status, type = 400, "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unauthorized(ApiError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotFound(ApiError):
    status, type = 404, "invalid_request_error"
    code, param = "model_not_found", "model"


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class BodyTimeout(ApiError):
    status, type, code = 408, "invalid_request_error", "body_timeout"


class TooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "body_too_large"


class Busy(ApiError):
    """``retry_after_s`` seconds from now there may be room."""

    status, type, code = 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(ApiError):
    status, type, code = 503, "service_unavailable", "not_ready"
    retry_after_s = SERVER_RETRY_S


class KeysError(ConfigError):
    """API keys are missing where they are required, or cannot be read."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, body and Retry-After of a refused request."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        line = re.sub(r"\s+", " ", self.message).strip()
        return {
            "error": {"message": line, "type": self.type, "param": self.param, "code": self.code}
        }

    def headers(self) -> dict[str, str]:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            # whole seconds, rounded up: a client that comes back early is refused again
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def answer_to(error: ParlError) -> ErrorAnswer:
    """How ``error`` looks on the wire; what it does not know is a 500."""
    text = str(error)
    match error:
        case ApiError():
            return ErrorAnswer(
                error.status, text, error.type, error.param, error.code, error.retry_after_s
            )
        case RateLimited():
            return ErrorAnswer(
                429, text, "rate_limit_error", None, "rate_limited", error.retry_after_s
            )
        case TryAgainLater():
            return ErrorAnswer(
                429, text, "rate_limit_error", None, "overloaded", error.retry_after_s
            )
        case ContextTooLong():
            return _bad(text, "messages", "context_length_exceeded")
        case CapacityError():
            return ErrorAnswer(429, text, "rate_limit_error", None, "overloaded", SERVER_RETRY_S)
        case ConstraintError():
            return _bad(text, None, "invalid_constraint")
        case ChatError():
            return _bad(text, "messages", "invalid_messages")
        case NotSupportedError():
            return _bad(text, None, "not_supported")
        case InvalidStateError():
            return _bad(text, None, "invalid_request")
        case DeadlineExceeded():
            return ErrorAnswer(503, text, "service_unavailable", None, "deadline", SERVER_RETRY_S)
        case ContextLost() | WeightsError():
            return ErrorAnswer(
                503, text, "service_unavailable", None, "engine_lost", SERVER_RETRY_S
            )
    return ErrorAnswer(500, f"{type(error).__name__}: {text}", "server_error", None, "internal")


def _bad(text: str, param: str | None, code: str) -> ErrorAnswer:
    return ErrorAnswer(400, text, "invalid_request_error", param, code)
