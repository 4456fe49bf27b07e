"""KimiRenderer: messages and tools -> token ids, append-only.

The layout is Kimi's (facts/kimi-facts.md 1.4): no newlines between messages, every message closed
by <|im_end|>, tool results as system messages named "tool":

    <|im_system|>tool_declare<|im_middle|>TOOLS<|im_end|>
    <|im_system|>system<|im_middle|>TEXT<|im_end|>
    <|im_user|>user<|im_middle|>TEXT<|im_end|>
    <|im_assistant|>assistant<|im_middle|>TEXT CALLS<|im_end|>
    <|im_system|>tool<|im_middle|>## Return of functions.NAME:INDEX\\nTEXT<|im_end|>

Two deviations keep it append-only and small: earlier reasoning stays in the history, and no system
message is made up where none is given. The released models' own layouts: engine.chat.kimi.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from engine.chat.base import CallText, Media, Message, Tokenizer, ToolDeclaration
from engine.chat.calls import CallFinder
from engine.chat.dialogue import Renderer, Span, check_append_only
from engine.chat.markers import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    EOS,
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    SECTION_BEGIN,
    SECTION_END,
    THINK_BEGIN,
    THINK_END,
)
from engine.errors import ChatError

DeclareTools = Literal["json", "names", "none"]
Think = Literal["never", "header_opens", "header_closes", "turn_opens"]
"""Where the <think> block of an assistant turn begins and ends; ``header_closes`` = it is empty."""

__all__ = ["CallText", "KimiRenderer", "Message", "ToolDeclaration", "check_append_only"]

_DECLARE = "tool_declare"
_TOOL = "tool"
_RETURN_OF = "## Return of "


class KimiRenderer(Renderer):
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
        super().__init__(tokenizer)
        self.declare_tools = declare_tools
        self.think: Think = "header_opens" if thinking else "never"
        self.default_system: str | None = None
        """System text where the dialogue begins without any."""

    @property
    def end_id(self) -> int:
        return self._id(IM_END)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._id(IM_END), self._id(EOS))

    @staticmethod
    def call_id(name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def generation_header(self) -> list[int]:
        header = self._open(IM_ASSISTANT, "assistant")
        if self.think in ("header_opens", "header_closes"):
            header.append(self._id(THINK_BEGIN))
        if self.think == "header_closes":
            header.append(self._id(THINK_END))
        return header

    def assistant_turn(
        self, text: str, calls: Sequence[CallText] = (), reasoning: str = ""
    ) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        if self.think == "turn_opens":
            ids.append(self._id(THINK_BEGIN))
        if self.think in ("turn_opens", "header_opens"):
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

    def observation(
        self, call_id: str, text: str, name: str = "", parts: Sequence[str | Media] = ()
    ) -> list[int]:
        """The result of one call; an empty ``call_id`` (a call that could not be read) has no
        heading."""
        if name in ("system", _DECLARE):
            raise ChatError(f"a tool named {name!r} would speak as the system; rename the tool")
        heading = f"{_RETURN_OF}{call_id}\n" if call_id else ""
        return self._message(IM_SYSTEM, name or _TOOL, heading + text, parts)

    def finder(self) -> CallFinder:
        return CallFinder(self.tokenizer)

    def parse(self, ids: Sequence[int]) -> list[Message]:
        roles = {self._id(marker): marker for marker in (IM_SYSTEM, IM_USER, IM_ASSISTANT)}
        header = self.generation_header()
        middle, end, start = self._id(IM_MIDDLE), self.end_id, 0
        finder = self.finder()
        ids = list(ids[: -len(header)] if list(ids[-len(header) :]) == header else ids)
        messages: list[Message] = []
        while start < len(ids):
            where = f"message {len(messages)} at id {start}"
            if ids[start] not in roles or end not in ids[start:]:
                raise ChatError(f"{where} is not a role marker, a name, a text and {IM_END}")
            stop = ids.index(end, start)
            if middle not in ids[start:stop]:
                raise ChatError(f"{where} has no {IM_MIDDLE} behind its name")
            split = ids.index(middle, start)
            name, content = self.tokenizer.decode(ids[start + 1 : split]), ids[split + 1 : stop]
            if ids[start] == self._id(IM_ASSISTANT):
                turn = finder.find(content)
                if turn.error is not None:
                    raise ChatError(f"{where}: {turn.error}")
                messages.append(Message("assistant", turn.text, turn.calls, "", turn.reasoning))
            elif name != _DECLARE:
                parts = self._parts_of(content)
                messages.append(_message_of(roles[ids[start]], name, parts))
            start = stop + 1
        return messages

    def _start(
        self, messages: Sequence[Message], tools: Sequence[ToolDeclaration]
    ) -> tuple[list[int], Sequence[Message]]:
        text = self._declared(tools) if tools else ""
        ids = self._message(IM_SYSTEM, _DECLARE, text) if text else []
        if self.default_system is not None and messages and messages[0].role != "system":
            ids += self._message(IM_SYSTEM, "system", self.default_system)
        return ids, messages

    def _declared(self, tools: Sequence[ToolDeclaration]) -> str:
        if self.declare_tools == "none":
            return ""
        if self.declare_tools == "names":
            return " ".join(f"functions.{tool.name}" for tool in tools)
        entries = [{"type": "function", "function": _function(tool)} for tool in tools]
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))

    def _other(self, message: Message) -> list[int]:
        marker = IM_SYSTEM if message.role == "system" else IM_USER
        return self._message(marker, message.name or message.role, message.text, message.parts)

    def _message(
        self, marker: str, name: str, text: str, parts: Sequence[str | Media] = ()
    ) -> list[int]:
        ids = self._open(marker, name)
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            ids += [*self._text(text), self._id(MEDIA_BEGIN), *self._text(part.kind)]
            ids += [self._id(MEDIA_CONTENT), *([self._id(MEDIA_PAD)] * part.num_tokens)]
            ids.append(self._id(MEDIA_END))
            # the newline behind an image is encoded together with the text that follows
            text = "\n" if part.kind == "image" else ""
        return [*ids, *self._text(text), self._id(IM_END)]

    def _parts_of(self, ids: Sequence[int]) -> list[str | Media]:
        """Text and media in turn: text is never missing at the ends, but may be empty."""
        ids = list(ids)
        parts: list[str | Media] = []
        begin, pad, end = (self._id(name) for name in (MEDIA_BEGIN, MEDIA_PAD, MEDIA_END))
        newline = ""
        while True:
            stop = ids.index(begin) if begin in ids else len(ids)
            parts.append(self.tokenizer.decode(ids[:stop]).removeprefix(newline))
            if stop == len(ids):
                return parts
            if end not in ids:
                raise ChatError(f"{MEDIA_BEGIN} without {MEDIA_END}")
            inside, ids = ids[stop + 1 : ids.index(end)], ids[ids.index(end) + 1 :]
            is_image = self.tokenizer.decode(inside).startswith("image")
            parts.append(Media("image" if is_image else "video", inside.count(pad)))
            newline = "\n" if is_image else ""

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


def _message_of(marker: str, name: str, parts: list[str | Media]) -> Message:
    first, *others = parts
    assert isinstance(first, str), "parts begin with text, which may be empty"
    if marker != IM_USER and name == "system":
        return Message("system", first)
    call_id = ""
    if marker != IM_USER and first.startswith(_RETURN_OF):
        call_id, _, first = first.removeprefix(_RETURN_OF).partition("\n")
    role, usual = ("user", "user") if marker == IM_USER else ("tool", _TOOL)
    return Message(
        role,
        "" if others else first,
        call_id=call_id,
        name="" if name == usual else name,
        parts=tuple(part for part in (first, *others) if part) if others else (),
    )
