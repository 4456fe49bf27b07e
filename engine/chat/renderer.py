"""KimiRenderer: messages and tools -> token ids, append-only.

The layout is Kimi's (facts/kimi-facts.md 1.4): no newlines between messages, every message closed
by <|im_end|>, tool results as system messages named "tool":

    <|im_system|>tool_declare<|im_middle|>TOOLS<|im_end|>
    <|im_system|>system<|im_middle|>TEXT<|im_end|>
    <|im_user|>user<|im_middle|>TEXT<|im_end|>
    <|im_assistant|>assistant<|im_middle|>TEXT CALLS<|im_end|>
    <|im_system|>tool<|im_middle|>## Return of functions.NAME:INDEX\\nTEXT<|im_end|>

Two deviations keep it append-only and small: earlier reasoning stays in the history, and no system
message is made up where none is given. Only markers that the renderer writes itself are special
ids; text of users, tools and models is bytes whatever it spells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from engine.chat.base import CallText, Message, Tokenizer, ToolDeclaration
from engine.chat.markers import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    SECTION_BEGIN,
    SECTION_END,
    THINK_BEGIN,
    THINK_END,
)
from engine.errors import ChatError

DeclareTools = Literal["json", "names", "none"]
Span = tuple[int, int]

__all__ = ["CallText", "KimiRenderer", "Message", "ToolDeclaration", "check_append_only"]


class KimiRenderer:
    """Pure functions of their arguments.

    ``declare_tools``: json = K2's compact JSON of OpenAI ``tools`` entries, names = only
    "functions.NAME" with spaces between (for models too small to read a schema), none = nothing.
    ``thinking``: the generation header opens a <think> block, which every assistant turn closes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        declare_tools: DeclareTools = "json",
        thinking: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.declare_tools = declare_tools
        self.thinking = thinking

    @property
    def end_id(self) -> int:
        """Ends every message; the id that a policy stops at."""
        return self._id(IM_END)

    @staticmethod
    def call_id(name: str, index: int) -> str:
        """The model's own id of a call; ``index`` counts calls over the whole dialogue from 0."""
        return f"functions.{name}:{index}"

    def prompt(
        self, system: str | None, user: str, tools: Sequence[ToolDeclaration] = ()
    ) -> list[int]:
        """Declarations, system and user message, then the header that the model answers after."""
        messages = [] if system is None else [Message("system", system)]
        messages.append(Message("user", user))
        return self.render(messages, tools) + self.generation_header()

    def generation_header(self) -> list[int]:
        """What precedes an assistant turn; never trained on."""
        header = self._open(IM_ASSISTANT, "assistant")
        return [*header, self._id(THINK_BEGIN)] if self.thinking else header

    def assistant_turn(
        self, text: str, calls: Sequence[CallText] = (), reasoning: str = ""
    ) -> tuple[list[int], list[Span]]:
        """What a model writes after ``generation_header``, and the spans [start, end) to train on.

        All of it is the model's: reasoning, text, calls and the end marker. Several turns of a
        dialogue with their headers: ``transcript``.
        """
        ids: list[int] = []
        if self.thinking:
            ids += [*self._text(reasoning), self._id(THINK_END)]
        elif reasoning:
            raise ChatError(
                f"assistant turn has reasoning {reasoning[:40]!r}, but the renderer was built with "
                "thinking=False; build it with thinking=True or drop the reasoning"
            )
        ids += self._text(text)
        if calls:
            ids.append(self._id(SECTION_BEGIN))
            for call in calls:
                ids += [self._id(CALL_BEGIN), *self._text(call.name_text)]
                ids += [self._id(ARGUMENT_BEGIN), *self._text(call.arguments_text)]
                ids.append(self._id(CALL_END))
            ids.append(self._id(SECTION_END))
        ids.append(self._id(IM_END))
        return ids, [(0, len(ids))]

    def observation(self, call_id: str, text: str) -> list[int]:
        """The result of one call; an empty ``call_id`` (a call that could not be read) has no
        heading."""
        heading = f"## Return of {call_id}\n" if call_id else ""
        return self._message(IM_SYSTEM, "tool", heading + text)

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
        ids = self._declaration(tools)
        spans: list[Span] = []
        for message in messages:
            if message.role == "assistant":
                ids += self.generation_header()
                turn, trained = self.assistant_turn(message.text, message.calls, message.reasoning)
                spans += [(len(ids) + start, len(ids) + end) for start, end in trained]
                ids += turn
            else:
                ids += self._other(message)
        return ids, spans

    def _other(self, message: Message) -> list[int]:
        if message.calls or message.reasoning:
            raise ChatError(
                f"{message.role} message has calls or reasoning; only an assistant message may"
            )
        if message.role == "tool":
            return self.observation(message.call_id, message.text)
        marker = IM_SYSTEM if message.role == "system" else IM_USER
        return self._message(marker, message.role, message.text)

    def _declaration(self, tools: Sequence[ToolDeclaration]) -> list[int]:
        if not tools or self.declare_tools == "none":
            return []
        if self.declare_tools == "names":
            text = " ".join(f"functions.{tool.name}" for tool in tools)
        else:
            entries = [{"type": "function", "function": _function(tool)} for tool in tools]
            text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
        return self._message(IM_SYSTEM, "tool_declare", text)

    def _message(self, marker: str, name: str, text: str) -> list[int]:
        return [*self._open(marker, name), *self._text(text), self._id(IM_END)]

    def _open(self, marker: str, name: str) -> list[int]:
        return [self._id(marker), *self._text(name), self._id(IM_MIDDLE)]

    def _id(self, marker: str) -> int:
        return self.tokenizer.special_id(marker)

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def _function(tool: ToolDeclaration) -> dict[str, object]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }


def check_append_only(
    renderer: KimiRenderer, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()
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
            assert after == before + renderer.generation_header() + turn, (
                f"message {index}: the turn is not its history, the generation header and the turn"
            )
        before = after
