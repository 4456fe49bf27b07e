"""The story of ``engine.bench.kv_fact --tokens``: facts far back in a long context, in LightEngine.

The policy is built by hand (engine.bench.kv_recall), because no small trained model reads so far.
A context grows to several lengths; its early part lies in cold records. At each length every fact
is asked for while it is cold and after ``rewarm_kv``, then sent back with ``evict_kv``. At the end
ten more rounds of both: numbers that come out different are drift.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.bench.kv_recall import Fact, Library, library, model_config, recall_weights
from engine.config import EngineConfig
from engine.kvcache.config import TierConfig
from engine.kvcache.quantise import BLOCK
from engine.light.engine import LightEngine
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EvictSelector,
    KVSummary,
    Sampling,
    StepRequest,
)

ROUNDS = 10
LONGEST = 12
"""Tokens after which an answer that has not ended is cut."""
PIECE = 4096


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy said of a fact; ``count`` tokens, END included."""

    text: str
    count: int
    is_right: bool


@dataclass(frozen=True, slots=True)
class Length:
    """cold, warm: answers by fact, before and after the re-warm; None where it was not cold."""

    tokens: int
    account: KVSummary
    cold: list[Said | None]
    warm: list[Said]


@dataclass(slots=True)
class Story:
    text: Library
    lengths: list[Length] = field(default_factory=list[Length])
    numbers: int = 0
    """Digits asked for in the rounds of evicting and warming."""
    wrong: int = 0
    prefill_s: float = 0.0
    """CPU seconds."""


def tell(
    lengths: Sequence[int],
    positions: Sequence[int],
    *,
    warm: int,
    directory: Path,
    attention: dict[str, object],
    rounds: int = ROUNDS,
) -> Story:
    """``warm``: coded tokens on the device; older ones lie in a file under ``directory``."""
    text = library(max(lengths), positions)
    model = model_config(len(text.names), max(lengths) + 64, **attention)
    config = EngineConfig(
        max_context=max(lengths) + 64,
        num_blocks=(model.attention.hot + 2 * 512) // BLOCK + 64,
        num_warm_blocks=warm // BLOCK + 128,
        tiers=TierConfig(warm=warm, cold="disk", directory=directory, host_bytes=1 << 20),
        report_codes=False,
    )
    weights = recall_weights(model)
    engine = LightEngine(model, config, fetch_weights=lambda _: weights)
    try:
        return asyncio.run(_tell(engine, text, sorted(lengths), rounds))
    finally:
        engine.close()


async def _tell(engine: LightEngine, text: Library, lengths: list[int], rounds: int) -> Story:
    story = Story(text)
    ids = text.token_ids
    # the others come in pieces
    ctx = await engine.init_context(ids[:1], ContextPolicy(deterministic=True))
    held = 1
    for length in lengths:
        begin = _cpu_seconds()
        while held < length:
            end = min(held + PIECE, length)
            await engine.append(ctx, ids[held:end])
            # a fork computes all tokens but the last
            await engine.release(await engine.fork(ctx))
            held = end
        story.prefill_s += _cpu_seconds() - begin
        story.lengths.append(await _at(engine, ctx, text, length))
    facts = [fact for fact in text.facts if fact.position < lengths[-1] // 2]
    for _ in range(rounds):
        for fact in facts:
            await _rewarm(engine, ctx, fact)
            said = await _ask(engine, ctx, text, fact)
            story.numbers += 3 * (len(fact.answer) - 1)
            story.wrong += _wrong_digits(text, fact, said)
            await _evict(engine, ctx, fact)
    return story


async def _at(engine: LightEngine, ctx: ContextId, text: Library, length: int) -> Length:
    account = await engine.get_kv_summary(ctx)
    cold: list[Said | None] = []
    warm: list[Said] = []
    for fact in text.facts:
        first = await _ask(engine, ctx, text, fact)
        back = await _rewarm(engine, ctx, fact)
        was_cold = (await engine.get_kv_summary(ctx)).num_cold < account.num_cold
        cold.append(first if was_cold else None)
        warm.append(await _ask(engine, ctx, text, fact) if back else first)
        if was_cold:
            await _evict(engine, ctx, fact)
    return Length(length, account, cold, warm)


def _where(fact: Fact) -> tuple[int, int]:
    return fact.position, fact.position + 1 + len(fact.answer)


async def _rewarm(engine: LightEngine, ctx: ContextId, fact: Fact) -> bool:
    return bool((await engine.rewarm_kv(ctx, EvictSelector(*_where(fact)))).loaded)


async def _evict(engine: LightEngine, ctx: ContextId, fact: Fact) -> None:
    gone = await engine.evict_kv(ctx, EvictSelector(*_where(fact), to="cold"))
    assert gone.confirmed and gone.freed_bytes > 0, f"nothing was evicted for {fact}"


async def _ask(engine: LightEngine, ctx: ContextId, text: Library, fact: Fact) -> Said:
    """On a fork, so that no answer helps the next one."""
    child = await engine.fork(ctx)
    await engine.append(child, [fact.key])
    done = await engine.forward_step(
        StepRequest(child, LONGEST, Sampling(temperature=0), (text.end,))
    )
    await engine.release(child)
    ids = tuple(done.token_ids.tolist())
    return Said(text.text(ids), len(ids), ids == fact.answer)


def _wrong_digits(text: Library, fact: Fact, said: Said) -> int:
    wanted = text.text(fact.answer).split()[:-1]
    got = [*said.text.split(), *[""] * len(wanted)]
    pairs = ((a, b.ljust(3)) for a, b in zip(wanted, got, strict=False))
    return sum(x != y for a, b in pairs for x, y in zip(a, b, strict=False))


def _cpu_seconds() -> float:
    """Of the whole process: the engine has a thread of its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report(story: Story) -> Iterator[str]:
    text = story.text
    for at in story.lengths:
        account = at.account
        yield (
            f"{at.tokens} tokens: {account.num_hot} in full precision, {account.num_warm} in "
            f"codes, {account.num_cold} cold; {account.kv_bytes / 1e6:.1f} MB on the device, "
            f"{account.cold_bytes / 1e6:.1f} MB in records"
        )
        yield f"  {'token':>7}  {'fact':<28}{'while cold':<34}re-warmed"
        for fact, cold, warm in zip(text.facts, at.cold, at.warm, strict=True):
            before = "(was not cold)" if cold is None else _short(cold.text)
            yield (
                f"  {fact.position:>7}  {text.text(fact.answer):<28}{before:<34}{_short(warm.text)}"
            )
        known = sum(said.is_right for said in at.warm)
        asked = [said for said in at.cold if said is not None]
        blind = sum(said.is_right for said in asked)
        yield f"  right: {blind} of {len(asked)} while cold, {known} of {len(at.warm)} re-warmed"
    counts = [[said.count for said in at.warm] for at in story.lengths]
    same = all(count == counts[0] for count in counts)
    yield (
        "tokens of the answers: "
        + ", ".join(f"{sum(c)} at {at.tokens}" for c, at in zip(counts, story.lengths, strict=True))
        + (": the same answer by answer" if same else ": they differ")
    )
    share = story.wrong / story.numbers if story.numbers else 0.0
    yield f"digits wrong in rounds of evict_kv and rewarm_kv: {story.wrong} of {story.numbers}"
    yield f"= {share:.2%} (at most 0.9 % is asked for); prefill {story.prefill_s:.0f} CPU s"


def _short(text: str) -> str:
    return text if len(text) <= 32 else text[:29] + "..."
