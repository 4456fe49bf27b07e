"""ChatMLRenderer: ChatML with Hermes tools, the format of SmolLM2, Qwen and many others.

    <|im_start|>system\\nTEXT TOOLS<|im_end|>\\n
    <|im_start|>user\\nTEXT<|im_end|>\\n
    <|im_start|>assistant\\nTEXT CALLS<|im_end|>\\n
    <|im_start|>tool\\n<tool_response>\\nTEXT\\n</tool_response><|im_end|>\\n

A call is \\n<tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>. The newline
behind a message is rendered with the next one, because a policy stops at <|im_end|>: a dialogue and
a generation header together are the template's text. Calls have no ids in this format: ``call_id``
is the tool's name, results are told apart by their order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from engine.chat.base import CallText, Media, Message, Tokenizer, ToolDeclaration
from engine.chat.dialogue import Renderer, Span
from engine.chat.hermes import CALL_CLOSE, CALL_OPEN, IM_END, IM_START, HermesFinder
from engine.errors import ChatError

RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatMLRenderer(Renderer):
    """Pure functions of their arguments.

    ``default_system``: system text where the dialogue begins without any; None = no system message
    unless tools must be declared. ``result_role``: tool = Hermes, user = Qwen, where a result is a
    user message (and several results of one turn stay several messages, to be append-only).
    The markers of calls and results are ids where the vocabulary has them, else text; then a user's
    text can spell a result, and a model's text a call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        default_system: str | None = None,
        result_role: Literal["tool", "user"] = "tool",
    ) -> None:
        super().__init__(tokenizer)
        self.default_system = default_system
        self.result_role = result_role
        self._begin, self._end = tokenizer.special_id(IM_START), tokenizer.special_id(IM_END)
        self._newline = tokenizer.encode("\n")

    @property
    def end_id(self) -> int:
        return self._end

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end, *(i for i in self.finder().ends if i != self._end))

    @staticmethod
    def call_id(name: str, index: int) -> str:
        del index
        return name

    def generation_header(self) -> list[int]:
        return [*self._newline, self._begin, *self.tokenizer.encode("assistant\n")]

    def assistant_turn(
        self, text: str, calls: Sequence[CallText] = (), reasoning: str = ""
    ) -> tuple[list[int], list[Span]]:
        if reasoning:
            raise ChatError(
                f"assistant turn has reasoning {reasoning[:40]!r}; ChatML has no place for it, "
                "drop it (drop_reasoning)"
            )
        parts: list[str] = [text]
        for call in calls:
            parts += ["\n" if len(parts) > 1 or text else "", CALL_OPEN]
            name = json.dumps(call.name_text, ensure_ascii=False)
            parts += [f'\n{{"name": {name}, "arguments": {call.arguments_text}}}\n', CALL_CLOSE]
        ids = [*self._parts(parts), self._end]
        return ids, [(0, len(ids))]

    def observation(
        self, call_id: str, text: str, name: str = "", parts: Sequence[str | Media] = ()
    ) -> list[int]:
        del call_id, name
        _refuse(parts)
        return [*self._newline, *self._result(text)]

    def finder(self) -> HermesFinder:
        return HermesFinder(self.tokenizer)

    def parse(self, ids: Sequence[int]) -> list[Message]:
        header = self.generation_header()
        ids = list(ids[: -len(header)] if list(ids[-len(header) :]) == header else ids)
        messages: list[Message] = []
        start, newline = 0, self._newline
        finder = self.finder()
        while start < len(ids):
            where = f"message {len(messages)} at id {start}"
            if messages:
                if ids[start : start + len(newline)] != newline:
                    raise ChatError(f"{where} does not begin with a newline")
                start += len(newline)
            if start >= len(ids) or ids[start] != self._begin or self._end not in ids[start:]:
                raise ChatError(f"{where} is not {IM_START}, a role, a text and {IM_END}")
            stop = ids.index(self._end, start)
            messages.append(self._message_of(ids[start + 1 : stop], finder, where))
            start = stop + 1
        return messages

    def _start(
        self, messages: Sequence[Message], tools: Sequence[ToolDeclaration]
    ) -> tuple[list[int], Sequence[Message]]:
        if not messages:
            return [], messages
        first = messages[0]
        system = first.text if first.role == "system" else self.default_system
        rest = messages[1:] if first.role == "system" else messages
        if tools:
            entries = [{"type": "function", "function": _function(tool)} for tool in tools]
            lines = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
            declared = _TOOLS.format(tools=lines)
            system = f"{system}\n\n{declared}" if system else declared
        if system is not None:
            return self._message("system", system), rest
        if first.role != "user":
            raise ChatError(
                f"a ChatML dialogue begins with {first.role}; expected a system or user message, "
                "or a renderer with a default_system"
            )
        return self._other(first)[len(self._newline) :], rest[1:]

    def _other(self, message: Message) -> list[int]:
        if message.name:
            raise ChatError(f"user message is named {message.name!r}; ChatML has no names of users")
        _refuse(message.parts)
        return [*self._newline, *self._message(message.role, message.text)]

    def _message(self, role: str, text: str) -> list[int]:
        return [self._begin, *self.tokenizer.encode(f"{role}\n{text}"), self._end]

    def _result(self, text: str) -> list[int]:
        parts = [f"{self.result_role}\n", RESPONSE_OPEN, f"\n{text}\n", RESPONSE_CLOSE]
        return [self._begin, *self._parts(parts), self._end]

    def _parts(self, parts: Sequence[str]) -> list[int]:
        """Ids of text and markers in turn; text between two ids is encoded in one piece."""
        ids: list[int] = []
        text = ""
        for position, part in enumerate(parts):
            own = position > 0 and part in _MARKERS and self.tokenizer.has_special(part)
            if not own:
                text += part
                continue
            ids += [*self.tokenizer.encode(text), self.tokenizer.special_id(part)]
            text = ""
        return ids + self.tokenizer.encode(text)

    def _message_of(self, ids: list[int], finder: HermesFinder, where: str) -> Message:
        decode = self.tokenizer.decode
        header = self.tokenizer.encode("assistant\n")
        if ids[: len(header)] == header:
            turn = finder.find(ids[len(header) :])
            if turn.error is not None:
                raise ChatError(f"{where}: {turn.error}")
            return Message("assistant", turn.text, turn.calls)
        role, _, text = decode(ids).partition("\n")
        opened, closed = f"{RESPONSE_OPEN}\n", f"\n{RESPONSE_CLOSE}"
        is_result = text.startswith(opened) and text[len(opened) :].endswith(closed)
        if is_result and self.tokenizer.has_special(RESPONSE_OPEN):
            is_result = self.tokenizer.special_id(RESPONSE_OPEN) in ids
        if role == self.result_role and is_result:
            return Message("tool", text[len(opened) : -len(closed)])
        if role == "system" or role == "user":
            return Message(role, text)
        raise ChatError(f"{where} is of {role[:40]!r}; expected system, user, assistant or tool")


_MARKERS = (CALL_OPEN, CALL_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE)


def _refuse(parts: Sequence[str | Media]) -> None:
    if parts:
        raise ChatError("ChatML has no place for media; expected a message with text alone")


def _function(tool: ToolDeclaration) -> dict[str, object]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters}
