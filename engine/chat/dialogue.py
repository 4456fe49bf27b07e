"""Renderer: what the chat formats of this room have in common.

A format is a pure function of its arguments and append-only: render(messages[:i]) is a prefix of
render(messages[:i + 1]), and an assistant message is its history, the generation header and the
turn. Only markers that the renderer writes itself are special ids; text of users, tools and models
is text, whatever it spells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

from engine.chat.base import CallText, Media, Message, Tokenizer, ToolDeclaration
from engine.chat.calls import FoundTurn
from engine.errors import ChatError

Span = tuple[int, int]


class TurnStream(Protocol):
    """A reader of one turn whose ids arrive in pieces."""

    def push(self, ids: Sequence[int]) -> list[CallText]:
        """Take the next ids; returns the calls that they complete."""
        ...

    def finish(self) -> FoundTurn: ...


class TurnFinder(Protocol):
    """Takes assistant turns of one format apart; never raises, whatever the model wrote."""

    def find(self, ids: Sequence[int]) -> FoundTurn:
        """``ids`` sampled after one generation header, with or without the end marker."""
        ...

    def stream(self) -> TurnStream: ...


class Renderer(ABC):
    """Messages and tools <-> token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    @abstractmethod
    def end_id(self) -> int:
        """Ends every message; the id that a policy stops at."""

    @property
    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """``end_id`` and whatever else a model may end its text with."""

    @staticmethod
    @abstractmethod
    def call_id(name: str, index: int) -> str:
        """The model's own id of a call; ``index`` counts calls over the whole dialogue from 0."""

    @abstractmethod
    def generation_header(self) -> list[int]:
        """What precedes an assistant turn; never trained on."""

    @abstractmethod
    def assistant_turn(
        self, text: str, calls: Sequence[CallText] = (), reasoning: str = ""
    ) -> tuple[list[int], list[Span]]:
        """What a model writes after ``generation_header``, and the spans [start, end) to train on.

        All of it is the model's: reasoning, text, calls and the end marker. Several turns of a
        dialogue with their headers: ``transcript``.
        """

    @abstractmethod
    def observation(
        self, call_id: str, text: str, name: str = "", parts: Sequence[str | Media] = ()
    ) -> list[int]:
        """The result of one call; an empty ``call_id`` is a call that could not be read."""

    @abstractmethod
    def finder(self) -> TurnFinder:
        """Reads what a model wrote after ``generation_header``."""

    @abstractmethod
    def parse(self, ids: Sequence[int]) -> list[Message]:
        """The messages of a rendered dialogue; a generation header at its end is dropped.

        ChatError where ``ids`` are no dialogue of this format. Tool declarations are not
        messages; system text that the renderer supplied is.
        """

    @abstractmethod
    def _start(
        self, messages: Sequence[Message], tools: Sequence[ToolDeclaration]
    ) -> tuple[list[int], Sequence[Message]]:
        """Ids of what opens the dialogue, and the messages that are still to be rendered."""

    @abstractmethod
    def _other(self, message: Message) -> list[int]:
        """Ids of a message that is not the assistant's."""

    def prompt(
        self, system: str | None, user: str, tools: Sequence[ToolDeclaration] = ()
    ) -> list[int]:
        """Declarations, system and user message, then the header that the model answers after."""
        messages = [] if system is None else [Message("system", system)]
        messages.append(Message("user", user))
        return self.render(messages, tools) + self.generation_header()

    def next_prompt(self, user: str) -> list[int]:
        """What follows an assistant turn (its end marker included) when the user goes on."""
        return self._other(Message("user", user)) + self.generation_header()

    def observations(self, results: Sequence[tuple[str, str]]) -> list[int]:
        """(call id, text) of one turn's calls, in call order."""
        return [token for call_id, text in results for token in self.observation(call_id, text)]

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()
    ) -> list[int]:
        """Ids of a dialogue; render(messages[:i]) is a prefix of render(messages[:i + 1])."""
        return self.transcript(messages, tools)[0]

    def transcript(
        self, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()
    ) -> tuple[list[int], list[Span]]:
        """Ids of a dialogue and the spans [start, end) of its assistant turns without headers."""
        for message in messages:
            _check(message)
        ids, rest = self._start(messages, tools)
        spans: list[Span] = []
        for message in rest:
            if message.role == "assistant":
                ids += self.generation_header()
                turn, trained = self.assistant_turn(message.text, message.calls, message.reasoning)
                spans += [(len(ids) + start, len(ids) + end) for start, end in trained]
                ids += turn
            elif message.role == "tool":
                ids += self.observation(message.call_id, message.text, message.name, message.parts)
            else:
                ids += self._other(message)
        return ids, spans


def loss_mask(num_ids: int, spans: Sequence[Span]) -> list[bool]:
    """One flag an id: True inside a span of ``transcript``."""
    mask = [False] * num_ids
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return mask


def number_calls(messages: Sequence[Message], renderer: Renderer) -> list[Message]:
    """Give every call and its result the format's own id, for dialogues of another system.

    ``name_text`` of a call is then a tool's bare name. Calls count from 0 over the whole dialogue
    and results answer them in order, so the ids of a prefix never change; a result that no call
    waits for gets no id. Policies trained on other systems' ids learn to write none of their own.
    """
    numbered: list[Message] = []
    waiting: list[str] = []
    count = 0
    for message in messages:
        if message.calls:
            ids = [renderer.call_id(c.name_text, count + i) for i, c in enumerate(message.calls)]
            count += len(ids)
            waiting += ids
            calls = zip(ids, message.calls, strict=True)
            message = replace(
                message, calls=tuple(CallText(i, call.arguments_text) for i, call in calls)
            )
        elif message.role == "tool":
            message = replace(message, call_id=waiting.pop(0) if waiting else "")
        numbered.append(message)
    return numbered


def drop_reasoning(
    messages: Sequence[Message], keep: Literal["open_turn", "nothing"] = "open_turn"
) -> list[Message]:
    """The history as Kimi's templates show it: earlier reasoning is emptied.

    ``open_turn`` keeps the reasoning behind the last assistant message that calls no tool, which
    is that of the turn still going on (thinking mode); ``nothing`` is the instant mode. A history
    that is rewritten is not append-only, so renderers never do this by themselves: apply it where
    a new context begins (facts/kimi-facts.md 1.4).
    """
    last = -1
    for index, message in enumerate(messages):
        if message.role == "assistant" and (keep == "nothing" or not message.calls):
            last = index
    return [
        replace(message, reasoning="") if index <= last else message
        for index, message in enumerate(messages)
    ]


def check_append_only(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()
) -> None:
    """Assert that each message only adds ids, and that a model's turn continues its header."""
    before = renderer.render([], tools)
    for index, message in enumerate(messages):
        after = renderer.render(messages[: index + 1], tools)
        assert after[: len(before)] == before, (
            f"message {index} ({message.role}) changed ids before it: history of {len(before)} "
            f"ids is no prefix of the {len(after)} ids after it"
        )
        if message.role == "assistant":
            turn, _ = renderer.assistant_turn(message.text, message.calls, message.reasoning)
            end = renderer.generation_header() + turn
            assert after[-len(end) :] == end and (index == 0 or after == before + end), (
                f"message {index}: the turn is not its history, the generation header and the turn"
            )
        before = after


def _check(message: Message) -> None:
    if message.role != "assistant" and (message.calls or message.reasoning):
        raise ChatError(
            f"{message.role} message has calls or reasoning; only an assistant message may"
        )
    if message.parts and (message.text or message.role in ("system", "assistant")):
        raise ChatError(
            f"{message.role} message has parts and text {message.text[:40]!r}; parts stand instead "
            "of the text of a user or a tool"
        )
    if message.name and message.role in ("system", "assistant"):
        raise ChatError(
            f"{message.role} message is named {message.name!r}; only users and tools have names"
        )
