"""TokenContexts: contexts of engines that keep no state but tokens between two calls."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import (
    CapacityError,
    ContextLost,
    ContextTooLong,
    DeadlineExceeded,
    InvalidStateError,
    NotSupportedError,
)
from engine.light.draws import check_key
from engine.light.sampler import MAX_ALTERNATIVES, check_sampling
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    FinishReason,
    StepDelta,
    StepRequest,
)

SEED_STREAM = 0xFFFE


@dataclass(slots=True)
class TokenContext:
    id: ContextId
    policy: ContextPolicy
    tokens: list[int]
    sampled: list[int] = field(default_factory=list)
    """Everything the policy said in this context, for the penalties."""
    cache: Any = None
    held: int = 0
    """Tokens whose keys and values are in ``cache``."""
    busy: str = ""
    """What runs for it; empty = idle."""
    cancelled: bool = False
    stepped: bool = False
    """A step began since it was opened or last evicted from."""


class TokenContexts:
    """Every method may be called from any thread; each is atomic."""

    def __init__(
        self, engine: str, vocab_size: int, max_context: int, max_contexts: int, has_text: bool
    ) -> None:
        """``has_text``: the engine knows its vocabulary, so stop texts can be found."""
        self.max_context = max_context
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_contexts = max_contexts
        self._has_text = has_text
        self._contexts: dict[ContextId, TokenContext] = {}
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._contexts)

    def all(self) -> list[TokenContext]:
        with self.lock:
            return list(self._contexts.values())

    def get(self, ctx: ContextId) -> TokenContext | None:
        return self._contexts.get(ctx)

    def open(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any]
    ) -> ContextId:
        self.refuse(bool(media), f"{len(media)} media items; this engine serves text only")
        self.refuse(
            policy.kv == "tiered" or policy.summaries,
            f"policy kv={policy.kv!r}, summaries={policy.summaries}; it keeps full KV",
        )
        self.refuse(policy.deterministic, "policy.deterministic; its row bits depend on the batch")
        tokens = [int(token) for token in token_ids]
        if not tokens:
            raise InvalidStateError("init_context got no tokens, expected at least one")
        if policy.draw is not None:
            check_key(policy.draw)
        self._check(tokens, len(tokens))
        return self.add(TokenContext(new_id(), policy, tokens))

    def add(self, context: TokenContext) -> ContextId:
        with self.lock:
            if len(self._contexts) >= self._max_contexts:
                raise CapacityError(
                    f"{self._max_contexts} contexts are open, the most allowed; release some"
                )
            self._contexts[context.id] = context
        return context.id

    def append(self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any]) -> None:
        self.refuse(bool(media), f"{len(media)} media items; this engine serves text only")
        tokens = [int(token) for token in token_ids]
        with self.lock:
            context = self.idle(ctx, "append")
            self._check(tokens, len(context.tokens) + len(tokens))
            context.tokens += tokens

    def close(self, ctx: ContextId) -> TokenContext | None:
        with self.lock:
            context = self._contexts.pop(ctx, None)
        if context is not None:
            context.cancelled = True
        return context

    def idle(self, ctx: ContextId, action: str) -> TokenContext:
        """ContextLost when unknown, InvalidStateError when something runs for it."""
        context = self._contexts.get(ctx)
        if context is None:
            raise ContextLost(f"{action}: context {ctx} is unknown; rebuild it with init_context")
        if context.busy:
            raise InvalidStateError(
                f"{action}: context {ctx} is running {context.busy}; await it or cancel it first"
            )
        if action == "get_kv_summary" and context.stepped:
            raise InvalidStateError(
                f"get_kv_summary: context {ctx} has stepped; ask after init_context, fork or "
                "evict_kv"
            )
        return context

    def begin_step(self, request: StepRequest) -> TokenContext:
        """The context, taken for ``request``; free it by ``busy = ""``."""
        with self.lock:
            context = self.idle(request.ctx, "forward_step")
            if request.max_new_tokens < 1:
                raise InvalidStateError(
                    f"max_new_tokens={request.max_new_tokens}, expected at least 1"
                )
            if not 0 <= request.num_logprobs <= MAX_ALTERNATIVES:
                raise InvalidStateError(
                    f"num_logprobs={request.num_logprobs}, expected 0 to {MAX_ALTERNATIVES}"
                )
            if request.deadline_s is not None and not request.deadline_s > 0:
                raise DeadlineExceeded(
                    f"deadline_s={request.deadline_s}: no time left when the step was asked for"
                )
            check_sampling(request.sampling, self._vocab_size)
            self.refuse(request.constraint is not None, "a constraint; LightEngine has them")
            self.refuse(
                bool(request.stop_texts) and not self._has_text,
                "stop_texts; give the engine its vocabulary",
            )
            if len(context.tokens) >= self.max_context:
                raise CapacityError(
                    f"context holds {len(context.tokens)} tokens, max_context is "
                    f"{self.max_context}: no room for a new one"
                )
            context.busy, context.cancelled, context.stepped = "a step", False, True
        return context

    def refuse(self, condition: bool, what: str) -> None:
        if condition:
            raise NotSupportedError(f"the {self._engine} engine got {what}")

    def _check(self, tokens: list[int], length: int) -> None:
        if length > self.max_context:
            raise ContextTooLong(f"{length} tokens exceed max_context={self.max_context}")
        bad = [t for t in tokens if not 0 <= t < self._vocab_size]
        if bad:
            raise InvalidStateError(
                f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}; tokenizer and "
                "model disagree"
            )


class Made:
    """What a step has made so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Any] = []
        self.text = b""
        self.stop_text: str | None = None
        self.finish: FinishReason | Any = ""

    def delta(self, start: int) -> StepDelta:
        tops = self.tops[start:]
        return StepDelta(
            np.array(self.ids[start:], np.int32),
            np.array(self.logprobs[start:], np.float32),
            np.stack([top.ids for top in tops]) if tops else None,
            np.stack([top.logprobs for top in tops]) if tops else None,
        )


def seed_key(seed: int) -> DrawKey:
    """The draws of ``Sampling.seed``: LightEngine's, so that engines agree."""
    return DrawKey(seed, stream=SEED_STREAM)


def new_id() -> ContextId:
    return ContextId(uuid.uuid4().hex)
