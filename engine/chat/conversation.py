"""Conversation: a person talks to a policy through an engine; tokens in, tokens out."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine.chat.dialogue import Renderer
from engine.chat.pieces import to_bytes
from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import ContextId, ContextPolicy, DrawKey, Sampling, StepRequest


@dataclass(frozen=True, slots=True)
class Manner:
    """How the policy answers."""

    system: str | None = None
    """None = what the renderer says where no system text is given."""
    max_new_tokens: int = 512
    """Of one answer."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    seed: int = 0
    step_tokens: int = 8
    """Tokens between two pieces of an answer."""


class Conversation:
    """One dialogue, one context of the engine: its KV is kept between the turns."""

    def __init__(self, engine: ModelRuntime, renderer: Renderer, manner: Manner) -> None:
        self._engine = engine
        self._renderer = renderer
        self._manner = manner
        self._ctx: ContextId | None = None
        self._ended = True
        """Whether the last turn wrote its own end marker."""

    async def say(self, user: str) -> AsyncIterator[str]:
        """The answer in pieces as it is sampled, without the marker that ends it."""
        ctx = await self._append(user)
        manner, stop_ids = self._manner, self._renderer.stop_ids
        sampling = Sampling(temperature=manner.temperature, top_p=manner.top_p)
        characters = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._ended = False
        left = manner.max_new_tokens
        while left > 0:
            request = StepRequest(ctx, min(left, manner.step_tokens), sampling, stop_ids)
            result = await self._engine.forward_step(request)
            left -= len(result.token_ids)
            ids = result.token_ids.tolist()
            if result.finish == "stop":
                # another end of text (EOS) is no end of a message
                self._ended = ids.pop() == self._renderer.end_id
                left = 0
            # a character may be spread over several ids
            yield characters.decode(to_bytes(self._renderer.tokenizer.decode(ids)))
        yield characters.decode(b"", final=True)

    async def close(self) -> None:
        """Release the context; the next ``say`` begins a new dialogue."""
        if self._ctx is not None:
            await self._engine.release(self._ctx)
            self._ctx, self._ended = None, True

    async def _append(self, user: str) -> ContextId:
        if self._ctx is None:
            policy = ContextPolicy(draw=DrawKey(self._manner.seed))
            prompt = self._renderer.prompt(self._manner.system, user)
            self._ctx = await self._engine.init_context(prompt, policy)
            return self._ctx
        end = [] if self._ended else [self._renderer.end_id]
        await self._engine.append(self._ctx, end + self._renderer.next_prompt(user))
        return self._ctx
