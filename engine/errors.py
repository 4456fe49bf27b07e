"""Errors of the engine.

EngineError
├── InvalidStateError   a call that the context's state does not allow
├── ContextLost         the engine that held the context is gone; rebuild it
├── CapacityError       no room for the context (tokens or slots)
├── NotSupportedError   this engine does not have the capability
├── ConstraintError     a constraint cannot be compiled, or not be met within the tokens asked for
├── TryAgainLater       not now (429); ``retry_after_s`` says when
│   ├── RateLimited     the caller's rate class is used up for now
│   └── Overloaded      the engine sheds load
├── DeadlineExceeded    the deadline passed before the request began
├── ChatError           text, ids or messages that no renderer can turn into the other
├── QuantiseError       keys or values that no code of the warm tier can stand for
├── BlockCorrupt        a spilled KV block is not what was written; compute it again
├── RouterError         the cold router's encoder, synonym file or blocks do not fit
├── AttentionError      a view of the cache, or a choice of tokens, that attention cannot read
├── WeightsError        a weight set is missing, corrupt, stale or does not fit the model
└── CheckpointError     a model folder or file cannot be read, or is of a model we do not have
"""

from infra.errors import ParlError


class EngineError(ParlError, RuntimeError):
    """Base class."""


class InvalidStateError(EngineError):
    """The context exists but may not do this now (for example: step while a step is running)."""


class ContextLost(EngineError):
    """The context is unknown to this engine, usually because the engine restarted."""


class CapacityError(EngineError):
    """The request does not fit: ``max_context`` or the KV block pool would overflow."""


class ContextTooLong(CapacityError):
    """More tokens than ``max_context``: waiting for others to give room would not help."""


class NotSupportedError(EngineError, NotImplementedError):
    """The engine declares in ``info()`` that it lacks this capability."""


class ConstraintError(EngineError, ValueError):
    """A schema, regex or grammar that cannot be compiled, or whose shortest text is too long."""


class TryAgainLater(EngineError):
    """Refused for now, nothing was computed; ``retry_after_s`` seconds from now it may work."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        # both in args, or pickle could not build it again
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class RateLimited(TryAgainLater):
    """The token bucket of the caller's rate class is empty."""


class Overloaded(TryAgainLater):
    """The engine's queue is full, or the engine drains."""


class DeadlineExceeded(EngineError, TimeoutError):
    """The request's deadline passed before it began; nothing was computed."""


class QuantiseError(EngineError, ValueError):
    """Keys or values are not finite, too large for an fp16 scale, or of a shape without a code."""


class BlockCorrupt(EngineError, OSError):
    """A KV block in host memory or on disk fails its checksum or header; prefill it again."""


class RouterError(EngineError, ValueError):
    """An encoder is not what it says, a synonym file cannot be used, or a block is unknown."""

    exit_code = 2


class AttentionError(EngineError, ValueError):
    """Tiers overlap or miss positions, or recorded selections do not fit the queries."""


class WeightsError(EngineError, ValueError):
    """A weight set failed its checksum, version or shape check; the old weights stay active."""


class CheckpointError(EngineError, ValueError):
    """A hub folder or GGUF file is missing, damaged, incomplete or of another kind of model."""

    exit_code = 2


class ChatError(EngineError, ValueError):
    """Text, token ids or messages that the tokenizer or renderer cannot turn into the other."""
