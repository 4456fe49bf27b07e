"""K2Renderer and K25Renderer: each branch of the templates, round trips, the prefix rule."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.base import CallText, Media, Message
from engine.chat.calls import ids_of_marked_text
from engine.chat.dialogue import check_append_only, drop_reasoning, loss_mask, number_calls
from engine.chat.kimi import DEFAULT_SYSTEM, K2Renderer, K25Renderer
from engine.chat.renderer import KimiRenderer, ToolDeclaration
from engine.chat.tokenizers import ByteTokenizer
from engine.errors import ChatError
from tests.engine.chat.dialogues import CALC, LOOKUP, dialogues, small_kimi

TOKENIZER = small_kimi()
SYSTEM = f"<|im_system|>system<|im_middle|>{DEFAULT_SYSTEM}<|im_end|>"
HEAD = "<|im_assistant|>assistant<|im_middle|>"
CALLED = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>"
    '{"key":"a"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)
RETURNED = "<|im_system|>tool<|im_middle|>## Return of functions.lookup:0\n5<|im_end|>"

RENDERERS = {
    "k2": lambda tokenizer: K2Renderer(tokenizer),
    "k2_thinking": lambda tokenizer: K2Renderer(tokenizer, thinking=True),
    "k25_thinking": lambda tokenizer: K25Renderer(tokenizer),
    "k25_instant": lambda tokenizer: K25Renderer(tokenizer, thinking=False),
}
THINKING = ("k2_thinking", "k25_thinking")
few = settings(max_examples=30)
every_renderer = pytest.mark.parametrize("name", RENDERERS)

DIALOGUE = [
    Message("user", "a?"),
    Message("assistant", "x", (CallText("functions.lookup:0", '{"key":"a"}'),), reasoning="hm"),
    Message("tool", "5", call_id="functions.lookup:0"),
    Message("assistant", "5", reasoning="ok"),
    Message("user", "b?"),
    Message("assistant", "", (CallText("functions.lookup:1", "{}"),), reasoning="so"),
]
PLAIN = drop_reasoning(DIALOGUE, keep="nothing")


def ids(text: str) -> list[int]:
    return ids_of_marked_text(text, TOKENIZER)


def spelled(renderer: KimiRenderer, messages, tools=()) -> str:
    return TOKENIZER.decode(renderer.render(messages, tools))


@pytest.mark.parametrize(
    ("name", "opened", "first", "second"),
    [
        ("k2", "", "", ""),
        ("k2_thinking", "", "<think>hm</think>", "<think>ok</think>"),
        ("k25_thinking", "<think>", "<think>hm</think>", "<think>ok</think>"),
        ("k25_instant", "<think></think>", "<think></think>", "<think></think>"),
    ],
)
def test_dialogue(name, opened, first, second):
    """System text, user, call, result, answer, and the header of the next turn."""
    renderer = RENDERERS[name](TOKENIZER)
    messages = DIALOGUE[:4] if name in THINKING else PLAIN[:4]
    expected = (
        f"{SYSTEM}<|im_user|>user<|im_middle|>a?<|im_end|>"
        f"{HEAD}{first}x{CALLED}{RETURNED}{HEAD}{second}5<|im_end|>"
    )
    assert renderer.render(messages) == ids(expected)
    assert renderer.render(messages) + renderer.generation_header() == ids(expected + HEAD + opened)


def test_given_system_text_replaces_the_default():
    """And an empty dialogue has none, because it would not be a prefix of both."""
    renderer = K25Renderer(TOKENIZER)
    assert spelled(renderer, [Message("system", "Be brief.")]) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
    )
    assert renderer.render([]) == []
    assert spelled(K25Renderer(TOKENIZER, default_system=None), [Message("user", "a")]) == (
        "<|im_user|>user<|im_middle|>a<|im_end|>"
    )


def test_k2_declares_compact_sorted_json():
    """Keys sorted at every depth; no key for a description that is not there."""
    assert spelled(K2Renderer(TOKENIZER), [], [LOOKUP, CALC]) == (
        '<|im_system|>tool_declare<|im_middle|>[{"function":'
        '{"description":"Read one value.\\nFast. 读","name":"lookup","parameters":{"properties":'
        '{"count":{"default":1,"type":"integer"},'
        '"key":{"description":"which one","minLength":1,"type":"string"}},'
        '"required":["key"],"type":"object"}},"type":"function"},'
        '{"function":{"name":"calc","parameters":{"type":"object"}},"type":"function"}]<|im_end|>'
    )


def test_k25_declares_typescript():
    """In front of the system text."""
    assert spelled(K25Renderer(TOKENIZER), [Message("user", "a")], [LOOKUP, CALC]) == (
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n"
        "## functions\n"
        "namespace functions {\n"
        "// Read one value.\n"
        "// Fast. 读\n"
        "type lookup = (_: {\n"
        "  // which one\n"
        "  // minLength: 1\n"
        "  key: string,\n"
        "  // Default: 1\n"
        "  count?: number\n"
        "}) => any;\n"
        "type calc = (_: {}) => any;\n"
        f"}}\n<|im_end|>{SYSTEM}<|im_user|>user<|im_middle|>a<|im_end|>"
    )


def test_k25_declares_json_where_a_schema_has_no_typescript():
    """All tools, as the released template does."""
    odd = ToolDeclaration("odd", "", {"type": "object", "properties": {"x": {"oneOf": []}}})
    assert K25Renderer(TOKENIZER).render([], [LOOKUP, odd]) == K2Renderer(TOKENIZER).render(
        [], [LOOKUP, odd]
    )


def test_named_users_and_tools():
    """A name stands where the role would."""
    messages = [
        Message("user", "a", name="Ann"),
        Message("tool", "5", call_id="functions.lookup:0", name="lookup"),
        Message("tool", "?"),
    ]
    assert spelled(K2Renderer(TOKENIZER), messages) == (
        f"{SYSTEM}<|im_user|>Ann<|im_middle|>a<|im_end|>"
        "<|im_system|>lookup<|im_middle|>## Return of functions.lookup:0\n5<|im_end|>"
        "<|im_system|>tool<|im_middle|>?<|im_end|>"
    )


@pytest.mark.parametrize("name", ["user", "tool"])
def test_media(name):
    """Placeholders stand where the image or the chunk of a video stands."""
    parts = (
        "see ",
        Media("image", 3),
        "and\n",
        "00:00:02.000",
        Media("video", 2),
        Media("image", 1),
    )
    written = (
        "see <|media_begin|>image<|media_content|><|media_pad|><|media_pad|><|media_pad|>"
        "<|media_end|>\nand\n00:00:02.000<|media_begin|>video<|media_content|><|media_pad|>"
        "<|media_pad|><|media_end|><|media_begin|>image<|media_content|><|media_pad|>"
        "<|media_end|>\n"
    )
    heads = {
        "user": "<|im_user|>user<|im_middle|>",
        "tool": "<|im_system|>tool<|im_middle|>## Return of f:0\n",
    }
    call_id = "f:0" if name == "tool" else ""
    renderer = K25Renderer(TOKENIZER, default_system=None)
    rendered = renderer.render([Message(name, parts=parts, call_id=call_id)])
    assert rendered == ids(f"{heads[name]}{written}<|im_end|>")
    (message,) = renderer.parse(rendered)
    merged = (*parts[:2], "and\n00:00:02.000", *parts[4:])
    assert message == Message(name, parts=merged, call_id=call_id)


def test_history_without_preserved_thinking():
    """Up to the last answer reasoning is emptied, that of the open turn stays."""
    assert [m.reasoning for m in drop_reasoning(DIALOGUE)] == ["", "", "", "", "", "so"]
    assert [m.reasoning for m in drop_reasoning(DIALOGUE[:3])] == ["", "hm", ""]
    assert not any(m.reasoning for m in PLAIN)
    text = spelled(K25Renderer(TOKENIZER), drop_reasoning(DIALOGUE))
    assert text.count("<think></think>") == 2
    assert text.count("<think>so</think>") == 1


def test_call_numbers_count_over_the_dialogue():
    """Calls of another system get Kimi's ids, results those of their calls in order."""
    f, g = CallText("f", "{}"), CallText("g.h", "{}")
    foreign = [
        Message("user", "a"),
        Message("assistant", "", (f, g)),
        Message("tool", "1", call_id="call_59adf"),
        Message("tool", "2", call_id="call_77"),
        Message("assistant", "", (f,)),
        Message("tool", "3"),
        Message("tool", "4", call_id="call_3"),
    ]
    numbered = number_calls(foreign, K25Renderer(TOKENIZER))
    names = [[c.name_text for c in m.calls] for m in numbered if m.calls]
    assert names == [["functions.f:0", "functions.g.h:1"], ["functions.f:2"]]
    assert [m.call_id for m in numbered if m.role == "tool"] == [
        "functions.f:0",
        "functions.g.h:1",
        "functions.f:2",
        "",
    ]
    for i in range(len(foreign)):
        assert number_calls(foreign[:i], K25Renderer(TOKENIZER)) == numbered[:i]


@every_renderer
@few
@given(data=st.data())
def test_append_only(name, data):
    """render(messages[:i]) is a prefix of render(messages[:i + 1]) for every dialogue."""
    renderer = RENDERERS[name](TOKENIZER)
    messages = data.draw(dialogues(thinking=name in THINKING, names=True))
    check_append_only(renderer, messages, [CALC])
    rendered = [renderer.render(messages[:i], [CALC]) for i in range(len(messages) + 1)]
    for before, after in pairwise(rendered):
        assert after[: len(before)] == before and len(after) > len(before)


@every_renderer
@few
@given(data=st.data())
def test_messages_come_back(name, data):
    """Render, then parse: the same messages, whatever their text spells."""
    renderer = RENDERERS[name](TOKENIZER)
    messages = data.draw(dialogues(thinking=name in THINKING, names=True))
    parsed = renderer.parse(renderer.render(messages, [LOOKUP]) + renderer.generation_header())
    if messages and messages[0].role != "system":
        messages = [Message("system", DEFAULT_SYSTEM), *messages]
    assert parsed == messages


@every_renderer
@few
@given(data=st.data())
def test_the_mask_shows_exactly_the_assistants_content(name, data):
    """Unmasked text = what each assistant message says, and its end marker."""
    renderer = RENDERERS[name](TOKENIZER)
    messages = data.draw(dialogues(thinking=name in THINKING))
    token_ids, spans = renderer.transcript(messages, [CALC])
    mask = loss_mask(len(token_ids), spans)
    unmasked = TOKENIZER.decode([i for i, on in zip(token_ids, mask, strict=True) if on])
    assert unmasked == "".join(_content(m, name) for m in messages if m.role == "assistant")


def _content(message: Message, name: str) -> str:
    """What a model writes for the message."""
    think = {
        "k2_thinking": f"<think>{message.reasoning}</think>",
        "k25_thinking": f"{message.reasoning}</think>",
    }.get(name, "")
    calls = "".join(
        f"<|tool_call_begin|>{c.name_text}<|tool_call_argument_begin|>{c.arguments_text}"
        "<|tool_call_end|>"
        for c in message.calls
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return f"{think}{message.text}{section}<|im_end|>"


@every_renderer
@few
@given(data=st.data())
def test_text_never_becomes_a_marker(name, data):
    """As many special ids as for the same dialogue without any text."""
    renderer = RENDERERS[name](TOKENIZER)
    messages = data.draw(dialogues(thinking=name in THINKING))
    empty = [
        Message(m.role, "", tuple(CallText("", "") for _ in m.calls), name="") for m in messages
    ]
    found, expected = (
        [i for i in renderer.render(each) if TOKENIZER.is_special(i)] for each in (messages, empty)
    )
    assert found == expected


@every_renderer
def test_the_byte_vocabulary_too(name):
    """Renderers need nothing of a vocabulary but its markers."""
    tokenizer = ByteTokenizer()
    messages = DIALOGUE if name in THINKING else PLAIN
    renderer = RENDERERS[name](tokenizer)
    rendered = renderer.render(messages, [LOOKUP])
    assert tokenizer.decode(rendered) == spelled(RENDERERS[name](TOKENIZER), messages, [LOOKUP])
    assert renderer.parse(rendered)[1:] == messages


@every_renderer
def test_turns_are_read_as_sampled(name):
    """The finder gets what follows the header, in pieces."""
    renderer = RENDERERS[name](TOKENIZER)
    message = DIALOGUE[1] if name in THINKING else PLAIN[1]
    turn, spans = renderer.assistant_turn(message.text, message.calls, message.reasoning)
    assert spans == [(0, len(turn))]
    stream = renderer.finder().stream()
    reported = [call for token_id in turn for call in stream.push([token_id])]
    found = stream.finish()
    assert (found.text, found.reasoning, found.error) == ("x", message.reasoning, None)
    assert found.calls == tuple(reported) == message.calls


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("assistant", "5", reasoning="hm"), "thinking=False"),
        (Message("tool", "5", name="system"), "speak as the system"),
        (Message("tool", "5", name="tool_declare"), "speak as the system"),
        (Message("system", "5", name="Ann"), "only users and tools"),
        (Message("user", "5", parts=("a",)), "instead of the text"),
        (Message("assistant", parts=("a",)), "instead of the text"),
        (Message("assistant", "5", name="Ann"), "only users and tools"),
        (Message("user", "5", (CallText("f:0", "{}"),)), "only an assistant"),
    ],
)
def test_refused_messages(message, reason):
    """One line that says why."""
    with pytest.raises(ChatError, match=reason):
        K25Renderer(TOKENIZER, thinking=False).render([message])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "message 0 at id 0 is not a role marker"),
        ("<|im_user|>user<|im_middle|>a", "is not a role marker"),
        ("<|im_user|>user<|im_end|>", "has no <|im_middle|>"),
        (f"{HEAD}<|tool_calls_section_begin|><|im_end|>", "section without a call"),
        ("<|im_user|>user<|im_middle|><|media_begin|>image<|im_end|>", "without <|media_end|>"),
    ],
)
def test_ids_that_are_no_dialogue(text, reason):
    """Named with the place."""
    with pytest.raises(ChatError, match=reason.replace("|", r"\|")):
        K2Renderer(TOKENIZER).parse(ids(text))


def test_declared_json_is_json():
    """What K2 reads is the tools it was given."""
    text = spelled(K2Renderer(TOKENIZER), [], [LOOKUP])
    declared = json.loads(text.split("<|im_middle|>")[1].removesuffix("<|im_end|>"))
    assert declared[0]["function"]["parameters"] == LOOKUP.parameters
