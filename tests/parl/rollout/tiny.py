"""A small honest world: an engine with a scripted policy, a line-based chat, sandboxes in process.

TinyRuntime keeps the promises of MRI (draws by position, expert reports, forks, lost contexts) and
can be told to die, hang or serve other weights at the n-th call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.errors import CapacityError, ContextLost
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepRequest,
    StepResult,
    WeightSet,
)
from parl.rollout.chat import ChatCall, Reply
from parl.rollout.episode import World
from parl.rollout.jobs import EpisodeJob, Limits
from parl.rollout.settings import RolloutSettings
from parl.rollout.waits import Waits
from sandbox.calls.decode import DEFAULT_POLICY
from sandbox.calls.policy import RepairPolicy
from sandbox.catalog.registry import get_family
from sandbox.errors import SandboxLost
from sandbox.fakes import InProcessSession
from sandbox.session import Observation, RawCall, Verdict
from sandbox.task import TaskSpec

END = 10  # newline ends a turn; lines inside a turn are separated by "|"
FAMILY = get_family("lookup_calc")

Policy = Callable[[list[int], DrawKey | None, int], list[int]]
"""(context, draw, weight version) -> the ids of one whole turn."""


@dataclass
class Context:
    tokens: list[int]
    policy: ContextPolicy
    num_reported: int = 0
    next_block: int = 1


@dataclass
class TinyRuntime:
    """``faults``: number of the engine call (from 1) -> what happens instead of it."""

    policy: Policy
    version: int = 0
    faults: dict[int, str] = field(default_factory=dict)
    contexts: dict[ContextId, Context] = field(default_factory=dict)
    num_calls: int = 0
    num_forks: int = 0
    released: list[list[int]] = field(default_factory=list)
    version_after_death: int | None = None

    async def _call(self) -> None:
        self.num_calls += 1
        fault = self.faults.get(self.num_calls)
        await asyncio.sleep(0)
        if fault == "die":
            self.die()
        elif fault == "hang":
            await asyncio.Event().wait()
        elif fault == "full":
            raise CapacityError("no block left")
        elif fault == "bug":
            raise KeyError("bug")

    def die(self) -> None:
        self.contexts.clear()
        if self.version_after_death is not None:
            self.version = self.version_after_death

    def _context(self, ctx: ContextId) -> Context:
        if ctx not in self.contexts:
            raise ContextLost(f"context {ctx} is unknown to this engine")
        return self.contexts[ctx]

    def _add(self, context: Context) -> ContextId:
        ctx = ContextId(f"c{self.num_calls}-{len(self.contexts)}")
        assert ctx not in self.contexts
        self.contexts[ctx] = context
        return ctx

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        await self._call()
        return self._add(Context(list(token_ids), policy))

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        await self._call()
        self._context(ctx).tokens.extend(token_ids)

    async def forward_step(self, request: StepRequest) -> StepResult:
        await self._call()
        context = self._context(request.ctx)
        start = len(context.tokens)
        ids = self.policy(list(context.tokens), context.policy.draw, self.version)
        ids = ids[: request.max_new_tokens]
        context.tokens += ids
        upto = len(context.tokens) - 1
        first, context.num_reported = context.num_reported, upto
        positions = np.arange(first, upto, dtype=np.int16)
        # as if blocks of 8 tokens turned warm 8 tokens later, coded as their own tokens
        block, context.next_block = context.next_block, max(context.next_block, upto // 8 - 1)
        coded = np.array(context.tokens[8 * block : 8 * context.next_block]).astype(np.uint8)
        return StepResult(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(start, start + len(ids), dtype=np.float32),
            finish="stop" if ids[-1] in request.stop_ids else "length",
            weight_version=self.version,
            start=start,
            experts=np.stack([positions, positions + 1], -1)[:, None, :],
            experts_start=first,
            codes=coded.reshape(-1, 8),
            codes_start=block,
        )

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        await self._call()
        parent = self._context(ctx)
        self.num_forks += 1
        return self._add(Context(list(parent.tokens), policy or parent.policy))

    async def release(self, ctx: ContextId) -> None:
        await asyncio.sleep(0)
        context = self.contexts.pop(ctx, None)
        if context is not None:
            self.released.append(context.tokens)

    async def cancel(self, ctx: ContextId) -> None:
        await asyncio.sleep(0)

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        return KVSummary(len(self._context(ctx).tokens), 0, 0, 0, 0)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        return EvictResult((), 0)

    async def load_weights(self, weights: WeightSet) -> int:
        self.version = weights.manifest.version
        return self.version

    async def info(self) -> EngineInfo:
        return EngineInfo("tiny", "1.1", self.version, "", 4096, 256)


class LineChat:
    """``?name {json}`` calls a tool, ``?!...`` is a structure nobody can read, the rest is text."""

    stop_ids = (END,)

    def prompt(self, task: TaskSpec) -> np.ndarray:
        return to_ids(f"{task.instruction}\n")

    def read(self, sampled_ids: np.ndarray) -> Reply:
        calls, words = [], []
        for line in to_text(sampled_ids).rstrip("\n").split("|"):
            if line.startswith("?!"):
                calls.append(ChatCall("", "", line[2:]))
            elif line.startswith("?"):
                name, _, arguments = line[1:].partition(" ")
                calls.append(ChatCall(name, name, arguments))
            else:
                words.append(line)
        return Reply("|".join(words), tuple(calls))

    def answer(self, results: Sequence[tuple[ChatCall, str]]) -> np.ndarray:
        return to_ids("".join(f">{text}\n" for _, text in results))


def to_ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def to_text(ids: Sequence[int] | np.ndarray) -> str:
    return bytes(int(i) for i in ids).decode()


def script(*turns: str) -> Policy:
    """Turn n of every episode; a noise word before it depends on draw and position alone."""

    def policy(context: list[int], draw: DrawKey | None, version: int) -> list[int]:
        index = sum(line.startswith(">") for line in to_text(context).split("\n"))
        turn = turns[min(index, len(turns) - 1)]
        if turn.startswith("?") and draw is not None:
            noise = random.Random(f"{draw}{len(context)}{version}").choices("abcdefgh", k=4)
            turn = "".join(noise) + "|" + turn
        return to_ids(f"{turn}\n").tolist()

    return policy


def lookup_task() -> TaskSpec:
    return FAMILY.instance(1, 0, "train", "lookup")


def add_task() -> TaskSpec:
    return FAMILY.instance(1, 0, "train", "add")


def oracle_policy(task: TaskSpec) -> Policy:
    """Solves ``task`` in one call a turn."""
    oracle = FAMILY.oracle(task)
    calls = [f"?{raw.name_text} {raw.arguments_text}" for (raw,) in oracle.rounds]
    return script(*calls, oracle.final_text)


class FaultySession(InProcessSession):
    """Dies or hangs at the n-th request of the whole world, or verifies to nonsense."""

    world_requests = 0

    def __init__(self, spec: TaskSpec, boxes: Boxes, repair: RepairPolicy) -> None:
        super().__init__(spec, FAMILY.bundle, repair=repair)
        self._boxes = boxes

    @property
    def enforced(self) -> dict[str, Any]:
        return self._boxes.enforced

    async def start(self) -> Observation:
        await self._boxes.request("start")
        return await super().start()

    async def call(self, raw: RawCall) -> Observation:
        await self._boxes.request("call")
        return await super().call(raw)

    async def verify(self, final_text: str) -> Verdict:
        await self._boxes.request("verify")
        if self._boxes.no_verdict:
            return Verdict(None, False, error="verifier: crash (ValueError)")
        return await super().verify(final_text)

    async def close(self) -> None:
        await asyncio.sleep(0)
        await super().close()
        self._boxes.open.discard(self)


@dataclass(eq=False)
class Boxes:
    """Opens sessions; ``faults``: number of the request (from 1) -> "lost" | "hang"."""

    faults: dict[int, str] = field(default_factory=dict)
    no_verdict: bool = False
    num_requests: int = 0
    num_opened: int = 0
    owners: list[str] = field(default_factory=list)
    enforced: dict[str, Any] = field(default_factory=dict[str, Any])
    open: set[FaultySession] = field(default_factory=set)

    async def __call__(
        self, spec: TaskSpec, owner: str = "", *, repair: RepairPolicy = DEFAULT_POLICY
    ) -> FaultySession:
        await asyncio.sleep(0)
        session = FaultySession(spec, self, repair)
        self.open.add(session)
        self.num_opened += 1
        self.owners.append(owner)
        return session

    async def request(self, what: str) -> None:
        self.num_requests += 1
        fault = self.faults.get(self.num_requests) or self.faults.get(-1)
        await asyncio.sleep(0)
        if fault == "lost":
            raise SandboxLost(f"box died in {what}")
        if fault == "hang":
            await asyncio.Event().wait()


FAST = RolloutSettings(backoff_s=0.001, max_attempts=3, max_rebuilds=2)


def make_world(
    policy: Policy, boxes: Boxes | None = None, settings: RolloutSettings = FAST, **engine: Any
) -> tuple[World, TinyRuntime, Boxes]:
    runtime = TinyRuntime(policy, **engine)
    boxes = boxes or Boxes()
    return World(runtime, boxes, LineChat(), settings, Waits("w0")), runtime, boxes


def make_job(task: TaskSpec, sample: int = 0, task_index: int = 0, **limits: Any) -> EpisodeJob:
    return EpisodeJob(
        run_id="run-1",
        phase="train",
        round=0,
        task_index=task_index,
        sample=sample,
        task=task,
        draw=DrawKey(3, 0, task_index, sample),
        limits=replace(Limits(max_tokens=400, max_tokens_per_turn=200), **limits),
        weight_version=0,
    )
