"""How a rollout talks: tokens in, tokens out. The loop itself never touches a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sandbox.task import TaskSpec


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A tool call found in sampled ids; ``call_id`` is the model's own ("functions.lookup:0").

    A structure that cannot be read at all is a call too (empty ``call_id``, the raw text as
    arguments), so that the session counts it as malformed and answers it.
    """

    call_id: str
    name_text: str
    arguments_text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy as read from its ids; ``text`` is the content outside calls."""

    text: str
    calls: tuple[ChatCall, ...]


class Chat(Protocol):
    """Pure functions between a task's words and token ids (int32 arrays)."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def prompt(self, task: TaskSpec) -> np.ndarray:
        """System text, tool declarations, instruction and the header the policy answers after."""
        ...

    def read(self, sampled_ids: np.ndarray) -> Reply:
        """Find the calls; never raises, whatever the policy wrote."""
        ...

    def answer(self, results: Sequence[tuple[ChatCall, str]]) -> np.ndarray:
        """Observation of each call in order, then the header of the next turn."""
        ...
