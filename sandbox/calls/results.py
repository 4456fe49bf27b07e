"""Read a tool's answer against the result schema it declares (the same matcher as for arguments).

An author who expects 城市 and 温度 is served by an API that answers city and temperature, and the
other way round; a key nobody asked for is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.calls.arguments import undo_misfits
from sandbox.calls.fit import fit
from sandbox.calls.json_text import JsonProblem, JsonText, read_json
from sandbox.calls.policy import KeyTier
from sandbox.calls.schema import CompiledSchema
from sandbox.calls.types import RESULT_TAG


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The answer in the words of the schema; every tag begins with ``result:``."""

    value: Any
    repairs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What the model reads: JSON in one line."""
        return json.dumps(self.value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class UnparsedResult:
    """The answer is not what the tool declares; ``message`` is one line."""

    message: str


def read_result(
    text: str,
    schema: CompiledSchema,
    aliases: Mapping[str, Iterable[str]] | None = None,
    words: frozenset[str] = frozenset(),
    tier: KeyTier = KeyTier.FUZZY,
) -> ReadResult | UnparsedResult:
    """``text`` as JSON that satisfies ``schema``. A schema of a bare string takes any text."""
    if schema.schema.get("type") == "string" and schema.is_valid(text):
        return ReadResult(text)
    exact = read_json(text, repair=False)
    if isinstance(exact, JsonText) and schema.is_closed_valid(exact.value):
        return ReadResult(exact.value)
    read = exact
    if not (isinstance(exact, JsonText) and schema.is_valid(exact.value)):
        read = read_json(text, repair=True)
    if isinstance(read, JsonProblem):
        return UnparsedResult(f"the answer is not JSON that can be read ({read.reason})")
    # a valid answer may still spell an optional key otherwise
    fitted = fit(read.value, schema.closed, tier, aliases, words, schema.part_is_valid)
    undo_misfits(fitted, schema)
    line, _ = schema.problems(fitted.value, fitted.odd_keys)
    if line:
        return UnparsedResult(line.replace("arguments:", "the answer:", 1))
    return ReadResult(fitted.value, _tagged((*read.repairs, *fitted.repairs)))


def _tagged(repairs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(RESULT_TAG + tag for tag in repairs)
