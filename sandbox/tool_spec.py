"""ToolSpec: one tool as the model sees it and as the sandbox guards it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Effect = Literal["read", "write", "destructive"]
"""What a call may do to the world; decides how far a broken call may be repaired."""
KeyRepair = Literal["off", "style", "alias", "fuzzy"]
"""How far an argument key may be matched at most."""

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=STRICT)
class PollSpec:
    """Waiting for a change by calling again: allowed ``max`` times, ``min_interval_s`` apart."""

    min_interval_s: float
    max: int


@dataclass(frozen=True, config=STRICT)
class LoopSpec:
    """What the loop detectors must know about a tool.

    ``cursor_args``: arguments that page through a list; ``ignore_args``, ``ignore_result``: keys
    that differ from call to call without meaning (a message id).
    """

    poll: PollSpec | None = None
    cursor_args: tuple[str, ...] = ()
    ignore_args: tuple[str, ...] = ()
    ignore_result: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class ToolSpec:
    """``schema`` is the JSON Schema (2020-12) of the arguments object.

    ``aliases`` are other names of the tool, ``key_aliases`` other spellings of an argument.
    ``result_schema``: JSON Schema of the answer; an answer that does not fit it ends the episode.
    ``result_aliases``: other spellings of the answer's keys. ``rate``: calls per second.
    """

    name: str
    description: str = ""
    schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    effect: Effect = "read"
    idempotent: bool = False
    aliases: tuple[str, ...] = ()
    key_aliases: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    result_schema: dict[str, Any] | None = None
    result_aliases: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    loop: LoopSpec = LoopSpec()
    cache: bool = False
    ttl_s: float | None = None
    rate: float | None = None

    def to_openai(self) -> dict[str, Any]:
        """The tool as an OpenAI ``tools`` entry, which every chat renderer takes."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.schema,
            },
        }
