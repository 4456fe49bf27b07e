"""A policy of random weights calls tools as their schemas say, always and to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from engine.chat.base import Tokenizer
from engine.chat.calls import CallFinder, FoundTurn
from engine.chat.hermes import HermesFinder
from engine.chat.tokenizers import ByteTokenizer
from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import ConstraintError
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.types import (
    Constraint,
    ContextPolicy,
    DrawKey,
    Sampling,
    StepDelta,
    StepRequest,
    StepResult,
)
from tests.engine.chat.dialogues import small_hf, small_kimi
from tests.engine.constrain.schemas import FAST, SCHEMAS
from tests.engine.tiny import make_weights

BYTES = ByteTokenizer()
END = BYTES.special_id("<|im_end|>")
PAD = 5
"""Ids of the model beyond the tokenizer's, as released models have."""


def random_engine(tokenizer: Tokenizer) -> LightEngine:
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size + PAD,
        hidden_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
    )
    weights = make_weights(config=model)
    config = EngineConfig(
        max_context=2048, num_blocks=2048, max_contexts=128, max_rows=256, deterministic=False
    )
    return LightEngine(
        model,
        config,
        fetch_weights=lambda _: weights,
        vocabulary=Vocabulary.of(tokenizer),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[LightEngine]:
    engine = random_engine(BYTES)
    yield engine
    engine.close()


def calls(tools: dict[str, Any], choice: object = "required", **more: object) -> Constraint:
    entries = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]
    return Constraint("tool_calls", json.dumps({"tools": entries, "choice": choice, **more}))


async def step(
    engine: LightEngine,
    constraint: Constraint,
    sample: int = 0,
    limit: int = 256,
    stop_ids: tuple[int, ...] = (),
    **asked: Any,
) -> StepResult:
    ctx = await engine.init_context([1, 2, 3], ContextPolicy(draw=DrawKey(1, task=sample)))
    try:
        return await engine.forward_step(
            StepRequest(ctx, limit, Sampling(), stop_ids, constraint=constraint, **asked)
        )
    finally:
        await engine.release(ctx)


async def streamed(engine: LightEngine, constraint: Constraint, sample: int) -> StepResult:
    """The same through a stream; what its deltas say is what the result says."""
    ctx = await engine.init_context([1, 2, 3], ContextPolicy(draw=DrawKey(1, task=sample)))
    tokens: list[int] = []
    async for part in engine.stream_step(StepRequest(ctx, 256, constraint=constraint)):
        if isinstance(part, StepDelta):
            tokens += part.token_ids.tolist()
            continue
        assert part.token_ids.tolist() == tokens
        await engine.release(ctx)
        return part
    raise AssertionError("a stream without a result")


def found(result: StepResult, tokenizer: Tokenizer, style: str) -> FoundTurn:
    assert result.finish == "stop"
    finder = CallFinder(tokenizer) if style == "kimi" else HermesFinder(tokenizer)
    turn = finder.find(result.token_ids.tolist())
    assert turn.error is None, turn
    return turn


def check_calls(turn: FoundTurn, tools: dict[str, Any], style: str) -> None:
    """At least one call, each of a declared tool, each with arguments its schema accepts."""
    assert turn.calls
    for index, call in enumerate(turn.calls):
        name = call.name_text
        if style == "kimi":
            name, number = name.removeprefix("functions.").rsplit(":", 1)
            assert call.name_text.startswith("functions.") and number == str(index)
        value = json.loads(call.arguments_text)
        errors = list(jsonschema_rs.validator_for(tools[name]).iter_errors(value))
        assert not errors, (name, call.arguments_text, errors[0].message)


async def check_all(engine: LightEngine, names: tuple[str, ...], style: str) -> None:
    async def one(number: int, name: str) -> None:
        tools = {name: SCHEMAS[name]}
        constraint = calls(tools, style=style, parallel=False)
        limit = 200
        result = await step(engine, constraint, number, limit, (END,))
        assert result.masks is not None and len(result.token_ids) <= limit
        check_calls(found(result, BYTES, style), tools, style)

    for start in range(0, len(names), 32):
        await asyncio.gather(*(one(start + i, n) for i, n in enumerate(names[start : start + 32])))


@pytest.mark.parametrize("style", ["kimi", "hermes"])
def test_a_few_schemas(engine: LightEngine, style: str):
    """One of each kind; the slow set has the others."""
    asyncio.run(check_all(engine, FAST, style))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", ["kimi", "hermes"])
def test_every_schema(engine: LightEngine, style: str):
    """100 % of more than a hundred."""
    assert len(SCHEMAS) >= 100
    asyncio.run(check_all(engine, tuple(SCHEMAS), style))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_schema_streamed(engine: LightEngine):
    """A stream says the same; several tools at once, several calls a turn."""

    async def one(number: int, names: tuple[str, ...]) -> None:
        tools = {name: SCHEMAS[name] for name in names}
        constraint = calls(tools, max_calls=3)
        result = await streamed(engine, constraint, number)
        check_calls(found(result, BYTES, "kimi"), tools, "kimi")
        whole = await step(engine, constraint, number)
        np.testing.assert_array_equal(whole.token_ids, result.token_ids)

    async def check() -> None:
        names = tuple(n for n in SCHEMAS if n not in ("ten numbers", "booking"))
        groups = [names[i : i + 4] for i in range(0, len(names), 4)]
        await asyncio.gather(*(one(i, group) for i, group in enumerate(groups)))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("tokenizer", "style"),
    [(small_kimi(), "kimi"), (small_hf(True), "hermes"), (small_hf(False), "hermes")],
    ids=["ranks", "hub", "hub without call markers"],
)
def test_vocabularies_whose_tokens_are_words(tokenizer: Tokenizer, style: str):
    """Markers are ids where the vocabulary has them, text elsewhere."""

    async def check(engine: LightEngine) -> None:
        for number, name in enumerate(("weather", "unicode keys", "recursive choice")):
            tools = {name: SCHEMAS[name], "noop": SCHEMAS["empty closed"]}
            result = await step(engine, calls(tools, style=style), number, 160)
            check_calls(found(result, tokenizer, style), tools, style)

    engine = random_engine(tokenizer)
    try:
        asyncio.run(check(engine))
    finally:
        engine.close()


# -- choices ---------------------------------------------------------------------------------------

TOOLS = {"get_time": SCHEMAS["empty closed"], "weather": SCHEMAS["weather"]}


def test_auto_may_say_anything_but_half_a_call(engine: LightEngine):
    """Text, calls, or both; whatever calls there are, are whole."""

    async def check() -> None:
        results = await asyncio.gather(
            *(step(engine, calls(TOOLS, "auto"), i, 60 + i) for i in range(12))
        )
        turns = [found(result, BYTES, "kimi") for result in results]
        assert any(turn.text for turn in turns)
        for turn in turns:
            if turn.calls:
                check_calls(turn, TOOLS, "kimi")

    asyncio.run(check())


def test_a_named_tool_is_called_once(engine: LightEngine):
    """And no other."""

    async def check() -> None:
        for choice in ({"name": "weather"}, {"type": "function", "function": {"name": "weather"}}):
            result = await step(engine, calls(TOOLS, choice, first_index=4))
            names = [call.name_text for call in found(result, BYTES, "kimi").calls]
            assert names == ["functions.weather:4"]

    asyncio.run(check())


def test_a_turn_that_begins_inside_its_reasoning(engine: LightEngine):
    """It closes the block that the header opened, then calls."""

    async def check() -> None:
        result = await step(engine, calls(TOOLS, reasoning="opened"), limit=120)
        ids = result.token_ids.tolist()
        end = ids.index(BYTES.special_id("</think>"))
        turn = CallFinder(BYTES).find(ids[end + 1 :])
        assert turn.error is None and turn.text == ""
        check_calls(turn, TOOLS, "kimi")

    asyncio.run(check())


# -- budgets and masks -----------------------------------------------------------------------------


def test_the_shortest_text_always_fits_or_the_step_does_not_begin(engine: LightEngine):
    """At every limit: a whole call, or a typed error that says how many tokens it takes."""
    tools = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}

    async def check() -> None:
        shortest = len('functions.f:0{"a": 0}') + 6
        for limit in range(shortest, shortest + 12):
            result = await step(engine, calls(tools), limit, limit)
            assert len(result.token_ids) <= limit
            check_calls(found(result, BYTES, "kimi"), tools, "kimi")
        with pytest.raises(ConstraintError, match=f"takes {shortest} tokens.* has {shortest - 1}"):
            await step(engine, calls(tools), limit=shortest - 1)

    asyncio.run(check())


def test_masks_are_what_was_sampled_from(engine: LightEngine):
    """Every token is allowed by its mask; a mask of one token has logprob 0; padding ids and
    markers inside of arguments are never allowed."""

    async def check() -> None:
        result = await step(engine, calls(TOOLS, {"name": "weather"}), num_logprobs=3)
        assert result.masks is not None and result.top_ids is not None
        size = BYTES.vocab_size + PAD
        assert result.masks.shape == (len(result.token_ids), -(-size // 8))
        allowed = np.unpackbits(result.masks, axis=1, bitorder="little").astype(bool)
        assert not allowed[:, BYTES.vocab_size :].any()
        for row, token, logprob, ids in zip(
            allowed, result.token_ids, result.logprobs, result.top_ids, strict=True
        ):
            assert row[token] and set(ids.tolist()) <= {-1, *np.flatnonzero(row).tolist()}
            assert row.sum() > 1 or logprob == 0.0
            specials = {i for i in np.flatnonzero(row).tolist() if BYTES.is_special(i)}
            assert not specials or specials == set(np.flatnonzero(row).tolist())

    asyncio.run(check())
