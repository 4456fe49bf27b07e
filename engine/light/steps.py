"""What a running step does with its logits: draw, constrain, keep, and know when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.chat.vocabulary import Vocabulary
from engine.constrain.guide import Guide
from engine.errors import (
    ConstraintError,
    DeadlineExceeded,
    InvalidStateError,
    NotSupportedError,
)
from engine.light.context import Context
from engine.light.debug import DebugTally
from engine.light.draws import uniforms
from engine.light.running import Listener, RunningStep
from engine.light.sampler import (
    MAX_ALTERNATIVES,
    Alternatives,
    DrawRows,
    RowRules,
    check_sampling,
    draw,
    has_penalties,
)
from engine.light.stop_texts import StopTexts, check_stop_texts
from engine.runtime.types import DrawKey, FinishReason, StepDelta, StepRequest, StepResult

_SEED_STREAM, _FRESH_STREAM = 0xFFFE, 0xFFFF
"""Streams of draws that no DrawKey of a rollout uses (the sandbox counts up from 0)."""


@dataclass(frozen=True, slots=True)
class Call:
    """What came with a request: its future, when it was made, who listens, and its constraint,
    compiled."""

    request: StepRequest
    future: Future[StepResult]
    made: float = field(default_factory=time.monotonic)
    listener: Listener | None = None
    guide: Guide | None = None


class Steps:
    """Begins steps and samples for them. Single-threaded."""

    def __init__(
        self,
        vocab_size: int,
        max_context: int,
        seed: int,
        vocabulary: Vocabulary | None,
        draw: DrawRows = draw,
    ) -> None:
        """``draw`` is the sampler's, or the runner's that is faster at plain rows."""
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._seed = seed
        self._vocabulary = vocabulary
        self._draw = draw
        self._num_unseeded = 0

    def check(self, request: StepRequest) -> None:
        """InvalidStateError, NotSupportedError or DeadlineExceeded for a request that cannot
        begin."""
        if request.max_new_tokens < 1:
            raise InvalidStateError(f"max_new_tokens={request.max_new_tokens}, expected at least 1")
        check_sampling(request.sampling, self._vocab_size)
        if not 0 <= request.num_logprobs <= MAX_ALTERNATIVES:
            raise InvalidStateError(
                f"num_logprobs={request.num_logprobs}, expected 0 to {MAX_ALTERNATIVES}"
            )
        check_stop_texts(request.stop_texts)
        if request.stop_texts and self._vocabulary is None:
            raise NotSupportedError(
                "stop_texts: this engine was started without a vocabulary and knows ids only; "
                "give it one (LightEngine(vocabulary=...)) or use stop_ids"
            )
        if request.deadline_s is not None and not request.deadline_s > 0:
            raise DeadlineExceeded(
                f"deadline_s={request.deadline_s}: no time left when the step was asked for"
            )

    def begin(self, context: Context, call: Call, epoch: int) -> RunningStep:
        """ConstraintError when the shortest text does not fit into what the context can hold."""
        request, length = call.request, len(context.tokens)
        room = min(request.max_new_tokens, self._max_context - length)
        if call.guide is not None and call.guide.shortest > room:
            raise ConstraintError(
                f"constraint {request.constraint and request.constraint.kind}: the shortest text "
                f"found takes {call.guide.shortest} tokens with its end, the step has {room} "
                f"(max_new_tokens={request.max_new_tokens}, context {length} of "
                f"{self._max_context}); allow more"
            )
        seconds = math.inf if request.deadline_s is None else request.deadline_s
        stop_ids = frozenset(request.stop_ids)
        return RunningStep(
            request,
            call.future,
            length,
            stop_ids if call.guide is None else stop_ids | call.guide.end_ids,
            epoch,
            rules=self._rules(context, call),
            guide=call.guide,
            stops=StopTexts(request.stop_texts) if request.stop_texts else None,
            deadline=call.made + seconds,
            listener=call.listener,
            debug=DebugTally() if request.debug else None,
        )

    def _rules(self, context: Context, call: Call) -> RowRules | None:
        """None where the sampler has nothing to do that it did not always do."""
        request, params = call.request, call.request.sampling
        if not (has_penalties(params) or request.num_logprobs or call.guide is not None):
            return None
        rules = RowRules(num_logprobs=request.num_logprobs)
        if params.repetition_penalty != 1.0:
            rules.seen = np.zeros(self._vocab_size, bool)
            rules.seen[context.tokens] = True
        if params.presence_penalty or params.frequency_penalty:
            rules.counts = np.zeros(self._vocab_size, np.int32)
            for start, end in context.sampled:
                np.add.at(rules.counts, context.tokens[start:end], 1)
        return rules

    def sample(
        self, contexts: Sequence[Context], logits: np.ndarray, weight_version: int
    ) -> list[tuple[Context, FinishReason]]:
        """A token for each context; logits float32 [len(contexts), V] of these weights. Those whose
        step it ends."""
        steps = [context.step for context in contexts if context.step is not None]
        keys = [self._key(context, step) for context, step in zip(contexts, steps, strict=True)]
        u = uniforms(keys, [len(context.tokens) for context in contexts])
        for context, step in zip(contexts, steps, strict=True):
            self._constrain(context, step)
        drawn = self._draw(
            logits, u, [step.request.sampling for step in steps], [step.rules for step in steps]
        )
        ended: list[tuple[Context, FinishReason]] = []
        for context, step, token, logprob, top in zip(
            contexts, steps, drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.tops, strict=True
        ):
            if step.guide is not None:
                token, logprob, top = self._guided(context, step, token, logprob, top)
            context.todo.append(len(context.tokens))
            context.tokens.append(token)
            step.sampled.append(token)
            step.logprobs.append(logprob)
            if step.rules is not None:
                _count(step.rules, token)
            if top is not None:
                step.tops.append(top)
            if step.listener is not None:
                step.listener(_delta(token, logprob, top, weight_version))
            reason = self._end(context, step, token)
            if reason is not None:
                ended.append((context, reason))
        return ended

    def _key(self, context: Context, step: RunningStep) -> DrawKey:
        if context.policy.draw is not None:
            return context.policy.draw
        if step.request.sampling.seed is not None:
            return DrawKey(step.request.sampling.seed, stream=_SEED_STREAM)
        # still a stream of its own per token
        self._num_unseeded += 1
        return DrawKey(self._seed, task=self._num_unseeded & 0xFFFFFFFF, stream=_FRESH_STREAM)

    def _left(self, context: Context, step: RunningStep) -> int:
        """Tokens that may still be sampled."""
        return min(
            step.request.max_new_tokens - len(step.sampled),
            self._max_context - len(context.tokens),
        )

    def _constrain(self, context: Context, step: RunningStep) -> None:
        if step.guide is None:
            return
        assert step.rules is not None, "a constrained step has rules"
        bits = step.guide.mask(self._left(context, step))
        step.masks.append(bits)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        step.rules.allowed = allowed.view(bool)

    def _guided(
        self,
        context: Context,
        step: RunningStep,
        token: int,
        logprob: float,
        top: Alternatives | None,
    ) -> tuple[int, float, Alternatives | None]:
        """The token drawn; or, where no end would be in reach behind it, the only one that leads
        there: it was not the policy's choice, so its mask has one bit and its logprob is 0."""
        assert step.guide is not None
        taken = step.guide.advance(token, self._left(context, step) - 1)
        if taken == token:
            return token, logprob, top
        step.masks[-1] = step.guide.only(taken)
        if top is not None:
            ids, logprobs = np.full_like(top.ids, -1), np.full_like(top.logprobs, -np.inf)
            ids[0], logprobs[0] = taken, 0.0
            top = Alternatives(ids, logprobs)
        return taken, 0.0, top

    def _end(self, context: Context, step: RunningStep, token: int) -> FinishReason | None:
        if token in step.stop_ids:
            return "stop"
        if step.stops is not None:
            assert self._vocabulary is not None, "checked when the step began"
            step.stop_text = step.stops.push(self._vocabulary.bytes_of(token))
            if step.stop_text is not None:
                return "stop"
        return "length" if self._left(context, step) <= 0 else None


def _count(rules: RowRules, token: int) -> None:
    if rules.seen is not None:
        rules.seen[token] = True
    if rules.counts is not None:
        rules.counts[token] += 1


def _delta(token: int, logprob: float, top: Alternatives | None, weight_version: int) -> StepDelta:
    return StepDelta(
        np.array([token], np.int32),
        np.array([logprob], np.float32),
        None if top is None else top.ids[None],
        None if top is None else top.logprobs[None],
        weight_version,
    )


class Told(NamedTuple):
    """The fields of a StepResult that only some requests ask for."""

    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    masks: np.ndarray | None = None


def told(step: RunningStep) -> Told:
    k, guide = step.request.num_logprobs, step.guide
    if not k and guide is None:
        return Told()
    shape = (len(step.tops), k)
    return Told(
        np.array([t.ids for t in step.tops], np.int32).reshape(shape) if k else None,
        np.array([t.logprobs for t in step.tops], np.float32).reshape(shape) if k else None,
        None
        if guide is None
        else np.array(step.masks, np.uint8).reshape(len(step.masks), guide.num_mask_bytes),
    )
