"""ChatFormat: how dialogues become prompts for one model, and turns become answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.chat.base import CallText, Message, Tokenizer, ToolDeclaration
from engine.chat.dialogue import Renderer, drop_reasoning
from engine.chat.markers import CALL_BEGIN, CALL_END, SECTION_BEGIN
from engine.chat.renderer import KimiRenderer
from engine.errors import ChatError
from engine.server.errors import BadRequest
from engine.server.turns import TurnDeltas, turn_deltas
from engine.server.turns.kimi import name_of
from engine.server.wire import AssistantMessage, ChatMessage, Content, ToolMessage, UserMessage


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """``thinking`` is None where the format has no blocks of reasoning."""

    instant: Renderer
    thinking: Renderer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.instant.tokenizer

    def renderer(self, thinking: bool) -> Renderer:
        return self.thinking if thinking and self.thinking is not None else self.instant

    @property
    def is_kimi(self) -> bool:
        return isinstance(self.instant, KimiRenderer)

    @property
    def call_style(self) -> str:
        """As Constraint's tool_calls names it."""
        return "kimi" if self.is_kimi else "hermes"

    @property
    def call_start_ids(self) -> tuple[int, ...]:
        """Markers that begin calls, where they are ids."""
        names = (SECTION_BEGIN, CALL_BEGIN) if self.is_kimi else ("<tool_call>",)
        return self._ids(names)

    @property
    def call_end_ids(self) -> tuple[int, ...]:
        """Markers that end one call, where they are ids."""
        return self._ids((CALL_END,) if self.is_kimi else ("</tool_call>",))

    def _ids(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.tokenizer.special_id(n) for n in names if self.tokenizer.has_special(n))

    def opens_thought(self, thinking: bool) -> bool:
        """Whether the generation header opens a block of reasoning."""
        return getattr(self.renderer(thinking), "think", "never") == "header_opens"

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], thinking: bool
    ) -> list[int]:
        """Ids up to and with the generation header; BadRequest names the message."""
        renderer = self.renderer(thinking)
        told = dialogue(messages, renderer)
        keeps = isinstance(renderer, KimiRenderer) and renderer.think in (
            "header_opens",
            "turn_opens",
        )
        # a request is a new context, where the released templates drop earlier reasoning too
        told = drop_reasoning(told, "open_turn" if keeps else "nothing")
        try:
            return renderer.render(told, tools) + renderer.generation_header()
        except ChatError as error:
            raise BadRequest(str(error), "messages", "invalid_messages") from error

    def turn(self, *, calls: bool, thinking: bool, call_prefix: str) -> TurnDeltas:
        """A reader of one answer."""
        return turn_deltas(
            self.renderer(thinking),
            calls=calls,
            thinking=self.opens_thought(thinking),
            call_prefix=call_prefix,
        )


def dialogue(messages: Sequence[ChatMessage], renderer: Renderer) -> list[Message]:
    """Messages of the wire as the renderer takes them.

    Ids of calls that the model wrote itself are repeated to the letter; others become the format's
    own, counted over the dialogue. BadRequest for a result that answers no call.
    """
    told: list[Message] = []
    native: dict[str, str] = {}
    count = 0
    for index, message in enumerate(messages):
        text = _text(message.content)
        if isinstance(message, AssistantMessage):
            calls: list[CallText] = []
            for call in message.tool_calls or ():
                own = _own_id(call.id, call.function.name, count, renderer)
                native[call.id] = own
                count += 1
                calls.append(CallText(own, call.function.arguments))
            if not calls and message.content is None:
                raise BadRequest(
                    "an assistant message needs content or tool_calls", f"messages.{index}"
                )
            told.append(
                Message("assistant", text, tuple(calls), "", message.reasoning_content or "")
            )
        elif isinstance(message, ToolMessage):
            told.append(_result(message, text, native, index, renderer))
        elif isinstance(message, UserMessage):
            told.append(Message("user", text, name=message.name or ""))
        else:
            told.append(Message("system", text))
    return told


def _result(
    message: ToolMessage, text: str, native: Mapping[str, str], index: int, renderer: Renderer
) -> Message:
    if message.tool_call_id not in native:
        raise BadRequest(
            f"tool message answers {message.tool_call_id!r}, the id of no tool call before it",
            f"messages.{index}.tool_call_id",
        )
    # K2's layout names who speaks; the tool's name is in the call's id anyway
    name = message.name or "" if isinstance(renderer, KimiRenderer) else ""
    return Message("tool", text, call_id=native[message.tool_call_id], name=name)


def _own_id(given: str, name: str, index: int, renderer: Renderer) -> str:
    if isinstance(renderer, KimiRenderer) and name_of(given) == name:
        return given
    return renderer.call_id(name, index)


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def num_calls(messages: Sequence[ChatMessage]) -> int:
    """Calls in a dialogue: the number of the next one in formats that count them."""
    return sum(len(m.tool_calls or ()) for m in messages if isinstance(m, AssistantMessage))
