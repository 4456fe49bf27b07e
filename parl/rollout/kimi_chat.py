"""KimiChat: the rollout's Chat over engine.chat, for a task's tools and instruction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.chat.calls import CallFinder
from engine.chat.renderer import KimiRenderer, ToolDeclaration
from parl.rollout.chat import ChatCall, Reply
from sandbox.task import TaskSpec


class KimiChat:
    """Pure functions of its renderer; safe to share between episodes."""

    def __init__(self, renderer: KimiRenderer, system: str | None = None) -> None:
        self._renderer = renderer
        self._finder = CallFinder(renderer.tokenizer)
        self._system = system

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._renderer.end_id,)

    def prompt(self, task: TaskSpec) -> np.ndarray:
        tools = [ToolDeclaration(t.name, t.description, t.schema) for t in task.tools]
        return np.array(
            self._renderer.prompt(self._system, task.instruction, tools), dtype=np.int32
        )

    def read(self, sampled_ids: np.ndarray) -> Reply:
        found = self._finder.find(sampled_ids.tolist())
        calls = [ChatCall(c.name_text, c.name_text, c.arguments_text) for c in found.calls]
        if found.error is not None:
            calls.append(ChatCall("", "", found.unread))
        return Reply(found.text, tuple(calls))

    def answer(self, results: Sequence[tuple[ChatCall, str]]) -> np.ndarray:
        ids: list[int] = []
        for call, text in results:
            ids += self._renderer.observation(call.call_id, text)
        return np.array(ids + self._renderer.generation_header(), dtype=np.int32)
