"""ChatMLRenderer: the layout, Hermes tools with and without ids for them, round trips, masks."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.base import CallText, Message
from engine.chat.chatml import ChatMLRenderer
from engine.chat.dialogue import check_append_only, loss_mask
from engine.chat.hermes import CALL_OPEN
from engine.errors import ChatError
from tests.engine.chat.dialogues import (
    CALC,
    CALL_MARKERS,
    LOOKUP,
    calls,
    dialogues,
    ids_of,
    json_calls,
    small_hf,
    small_kimi,
    texts,
)

TOKENIZER = small_hf()
TEXT_ONLY = small_hf(call_markers=False)
RENDERER = ChatMLRenderer(TOKENIZER)
few = settings(max_examples=30)
both = pytest.mark.parametrize("tokenizer", [TOKENIZER, TEXT_ONLY], ids=["ids", "text"])

DIALOGUE = [
    Message("system", "Be brief."),
    Message("user", "a?"),
    Message("assistant", "x", (CallText("lookup", '{"key": "a"}'), CallText("calc", "{}"))),
    Message("tool", "5"),
    Message("tool", "6"),
    Message("assistant", "", (CallText("calc", '{"b": 1}'),)),
    Message("tool", "7"),
    Message("assistant", "18"),
]
WRITTEN = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\na?<|im_end|>\n"
    "<|im_start|>assistant\nx\n"
    '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call><|im_end|>\n'
    "<|im_start|>tool\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    "<|im_start|>tool\n<tool_response>\n6\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
    '<tool_call>\n{"name": "calc", "arguments": {"b": 1}}\n</tool_call><|im_end|>\n'
    "<|im_start|>tool\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n18<|im_end|>\n"
)
HEADER = "<|im_start|>assistant\n"


def drawn(data, tokenizer):
    """Where text decides what a call is, content spells none and arguments are JSON."""
    if tokenizer is TOKENIZER:
        return data.draw(dialogues(call=calls, result_ids=False, first=("system", "user")))
    no_calls = texts.filter(lambda text: not any(marker in text for marker in CALL_MARKERS))
    written = dialogues(
        call=json_calls, content=no_calls, result_ids=False, first=("system", "user")
    )
    return data.draw(written)


@both
def test_dialogue(tokenizer):
    """The dialogue and a generation header are the template's text, markers are ids if they can."""
    renderer = ChatMLRenderer(tokenizer)
    ids = renderer.render(DIALOGUE) + renderer.generation_header()
    assert tokenizer.decode(ids) == WRITTEN + HEADER
    assert renderer.parse(ids) == DIALOGUE
    assert (tokenizer is TOKENIZER) == tokenizer.has_special(CALL_OPEN)
    specials = [tokenizer.decode([i]) for i in ids if tokenizer.is_special(i)]
    assert specials.count("<tool_call>") == (3 if tokenizer is TOKENIZER else 0)
    assert specials.count("<|im_end|>") == 8


def test_results_in_the_role_of_the_user():
    """Qwen's way."""
    renderer = ChatMLRenderer(TOKENIZER, result_role="user")
    ids = renderer.render(DIALOGUE)
    assert TOKENIZER.decode(ids) + "\n" == WRITTEN.replace(
        "<|im_start|>tool\n", "<|im_start|>user\n"
    )
    assert renderer.parse(ids) == DIALOGUE


TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "lookup", "description": "Read one value.\\nFast. 读", \
"parameters": {"type": "object", "properties": {"key": {"type": "string", "description": \
"which one", "minLength": 1}, "count": {"type": "integer", "default": 1}}, "required": ["key"]}}}
{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


@pytest.mark.parametrize(
    ("default", "given_system", "system"),
    [
        (None, None, TOOLS),
        (None, "Be brief.", f"Be brief.\n\n{TOOLS}"),
        ("You are S.", None, f"You are S.\n\n{TOOLS}"),
        ("You are S.", "", TOOLS),
    ],
)
def test_tools_stand_in_the_system_message(default, given_system, system):
    """Behind the given text, else the default one, else alone."""
    renderer = ChatMLRenderer(TOKENIZER, default_system=default)
    assert TOKENIZER.decode(renderer.prompt(given_system, "a", [LOOKUP, CALC])) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\na<|im_end|>\n{HEADER}"
    )


def test_system_text_without_tools():
    """Default only where none is given; none at all without a default."""
    user = f"<|im_start|>user\na<|im_end|>\n{HEADER}"
    default = ChatMLRenderer(TOKENIZER, default_system="You are S.")
    assert TOKENIZER.decode(RENDERER.prompt(None, "a")) == user
    assert TOKENIZER.decode(default.prompt(None, "a")) == (
        f"<|im_start|>system\nYou are S.<|im_end|>\n{user}"
    )
    assert default.prompt("T", "a") == RENDERER.prompt("T", "a")
    assert default.render([], [LOOKUP]) == []


@both
@few
@given(data=st.data())
def test_append_only(tokenizer, data):
    """render(messages[:i]) is a prefix of render(messages[:i + 1]) for every dialogue."""
    renderer = ChatMLRenderer(tokenizer)
    messages = drawn(data, tokenizer)
    check_append_only(renderer, messages, [CALC])
    rendered = [renderer.render(messages[:i], [CALC]) for i in range(len(messages) + 1)]
    for before, after in pairwise(rendered):
        assert after[: len(before)] == before
        assert len(after) > len(before)


@both
@few
@given(data=st.data())
def test_messages_come_back(tokenizer, data):
    """Render, then parse: the same messages, whatever their text spells."""
    renderer = ChatMLRenderer(tokenizer)
    messages = drawn(data, tokenizer)
    ids = renderer.render(messages)
    assert renderer.parse(ids + renderer.generation_header() if ids else ids) == messages


@both
@few
@given(data=st.data())
def test_the_mask_shows_exactly_the_assistants_content(tokenizer, data):
    """Unmasked text = what each assistant message says, and its end marker."""
    renderer = ChatMLRenderer(tokenizer, default_system="S")
    messages = drawn(data, tokenizer)
    ids, spans = renderer.transcript(messages, [CALC])
    mask = loss_mask(len(ids), spans)
    unmasked = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert unmasked == "".join(_content(m) for m in messages if m.role == "assistant")


def _content(message: Message) -> str:
    """What a model writes for the message."""
    written = RENDERER.assistant_turn("", message.calls)[0][:-1]
    between = "\n" if message.text and message.calls else ""
    return f"{message.text}{between}{TOKENIZER.decode(written)}<|im_end|>"


@both
@few
@given(data=st.data())
def test_text_never_becomes_a_marker(tokenizer, data):
    """As many special ids as for the same dialogue without any text."""
    renderer = ChatMLRenderer(tokenizer)
    messages = drawn(data, tokenizer)
    empty = [Message(m.role, "", tuple(CallText("", "") for _ in m.calls)) for m in messages]
    found, expected = (
        [i for i in renderer.render(each) if tokenizer.is_special(i)] for each in (messages, empty)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([Message("assistant", "5")], "begins with assistant"),
        ([Message("tool", "5")], "begins with tool"),
        ([Message("user", "a"), Message("assistant", "5", reasoning="hm")], "no place for it"),
        ([Message("user", "a"), Message("user", "a", name="Ann")], "no names of users"),
        ([Message("user", "a", name="Ann")], "no names of users"),
        ([Message("user", parts=("a",))], "no place for media"),
        ([Message("user", "a"), Message("tool", parts=("a",))], "no place for media"),
    ],
)
def test_refused_dialogues(messages, reason):
    """One line that says why."""
    with pytest.raises(ChatError, match=reason):
        RENDERER.render(messages)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "message 0 at id 0 is not"),
        ("<|im_start|>robot\nhi<|im_end|>", "is of 'robot'"),
        ("<|im_start|>user\nhi<|im_end|><|im_start|>user\nhi<|im_end|>", "begin with a newline"),
        ("<|im_start|>assistant\n<tool_call>\n{}<|im_end|>", "truncated call"),
    ],
)
def test_ids_that_are_no_dialogue(text, reason):
    """Named with the place."""
    with pytest.raises(ChatError, match=reason):
        RENDERER.parse(ids_of(text, TOKENIZER))


def test_a_vocabulary_without_chatml():
    """Is refused when the renderer is made."""
    with pytest.raises(ChatError, match="im_start"):
        ChatMLRenderer(small_kimi())


def test_calls_have_no_ids():
    """Results follow the order of their calls."""
    assert RENDERER.call_id("lookup", 3) == "lookup"
    assert RENDERER.observations([("lookup", "1"), ("", "2")]) == (
        RENDERER.observation("lookup", "1") + RENDERER.observation("", "2")
    )
