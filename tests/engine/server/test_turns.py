"""Deltas of a turn: the same sum however the tokens arrive, and what the finders find."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.base import CallText
from engine.chat.chatml import ChatMLRenderer
from engine.chat.dialogue import Renderer
from engine.chat.kimi import K2Renderer, K25Renderer
from engine.chat.markers import SPECIAL_TOKENS
from engine.chat.tokenizers import ByteTokenizer
from engine.server.turns import Turn, fold, turn_deltas
from tests.engine.chat.dialogues import ids_of, small_hf, small_kimi, texts

KIMI = K2Renderer(ByteTokenizer(words=("lookup", '{"')))
KIMI_BPE = K2Renderer(small_kimi())
THINKING = K25Renderer(ByteTokenizer(), thinking=True)
CHATML = ChatMLRenderer(small_hf(call_markers=False))
QWEN = ChatMLRenderer(small_hf(call_markers=True))
RENDERERS = {"kimi": KIMI, "bpe": KIMI_BPE, "thinking": THINKING, "text": CHATML, "ids": QWEN}

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
objects = st.dictionaries(texts, values, max_size=3)
indents = st.sampled_from((None, 1))
names = st.text("abc_-.", min_size=1, max_size=6).filter(lambda name: name.strip())


def read(renderer: Renderer, ids: list[int], cuts: list[int]) -> tuple[Turn, str | None]:
    """The turn from ids in pieces that end at ``cuts``."""
    reader = turn_deltas(
        renderer, calls=True, thinking=getattr(renderer, "think", "") == "header_opens"
    )
    deltas = []
    start = 0
    for end in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        deltas += reader.push(ids[start:end])
        start = end
    deltas += reader.finish()
    assert all(d.content or d.reasoning or d.call for d in deltas), "no delta says nothing"
    return fold(deltas), reader.error


def spelled(turn: Turn) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in turn.calls]


FEW = settings(max_examples=25)
cuts = st.lists(st.integers(0, 400), max_size=12)


@FEW
@given(st.sampled_from(sorted(RENDERERS)), texts, texts, st.data(), cuts)
def test_a_rendered_turn_is_read_back(kind, text, thought, data, where):
    """Content, reasoning, names and arguments of a turn, markers in strings included; the finder
    of engine.chat says the same; calls are cut everywhere."""
    renderer = RENDERERS[kind]
    pairs = data.draw(st.lists(st.tuples(names, objects, indents), max_size=3))
    calls = [
        CallText(renderer.call_id(name, i), json.dumps(value, ensure_ascii=False, indent=indent))
        for i, (name, value, indent) in enumerate(pairs)
    ]
    if kind == "text":
        # text decides there, so content that spells a call is one
        text = text.replace("<", "(")
    thought = thought if kind == "thinking" else ""
    ids, _ = renderer.assistant_turn(text, calls, thought)
    turn, error = read(renderer, ids, where)
    found = renderer.finder().find(
        [renderer.tokenizer.special_id("<think>"), *ids] if kind == "thinking" else ids
    )
    assert error is None and found.error is None
    assert (turn.content, turn.reasoning) == (found.text, found.reasoning)
    assert [name for name, _ in spelled(turn)] == [name for name, _, _ in pairs]
    assert [arguments for _, arguments in spelled(turn)] == [c.arguments_text for c in calls]
    assert [c.arguments_text for c in found.calls] == [c.arguments_text for c in calls]
    if kind in ("kimi", "bpe", "thinking"):
        assert [call.id for call in turn.calls] == [call.name_text for call in calls]


@pytest.mark.parametrize("kind", sorted(RENDERERS))
@FEW
@given(data=st.data())
def test_any_ids_in_any_pieces(kind, data):
    """Ids without sense, markers everywhere: the sum does not depend on the pieces, nothing raises,
    markers never show, and calls that the finder finds complete are there."""
    renderer = RENDERERS[kind]
    tokenizer = renderer.tokenizer
    specials = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    ids = data.draw(
        st.lists(
            st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(specials)),
            max_size=40,
        )
    )
    whole = read(renderer, ids, [])
    assert read(renderer, ids, data.draw(cuts)) == whole
    assert read(renderer, ids, list(range(len(ids)))) == whole
    if kind in ("kimi", "bpe"):
        found = renderer.finder().find(ids)
        assert len(whole[0].calls) - len(found.calls) in (0, 1)
        written = [c.arguments_text for c in found.calls]
        told = [call.arguments for call in whole[0].calls[: len(written)]]
        # bytes that are no text: lone surrogates there, U+FFFD here
        assert [_text(one) for one in told] == [_text(one) for one in written]


def _text(text: str) -> str:
    return "".join(c for c in text if c != "\ufffd" and not "\ud800" <= c <= "\udfff")


_WRITTEN = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "text", "é", '"', "\\"),
            *('{"name": "f", "arguments": ', '{"a": "</tool_call>"}', "{}", "}", "[1]", ", "),
            *('{"arguments": {"x": 1}, "name": "g"}', '{"name"', '"id": 3', "12", "{"),
        ]
    ),
    max_size=14,
).map("".join)


@FEW
@given(_WRITTEN, st.data(), cuts)
def test_hermes_text_in_any_tokens(text, data, where):
    """In text mode neither the pieces nor how the text is cut into tokens matter."""
    whole = read(CHATML, CHATML.tokenizer.encode(text), [])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *places, len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    ids = [i for part in parts for i in CHATML.tokenizer.encode(part)]
    assert read(CHATML, ids, where) == whole


@pytest.mark.parametrize(
    ("written", "content", "calls", "error"),
    [
        ("a\n<tool_call>\n{}\n</tool_call>", "a", [], "a call that is not"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')], "truncated"),
        ('<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')], "truncated"),
        ('<tool_call>{"name": "f"', "", [], "truncated"),
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}, "id": 3}</tool_call> ok',
            "",
            [("f", '{"x": 1}')],
            None,
        ),
        (
            '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>',
            "",
            [("f", '{"x": 1}')],
            None,
        ),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", '"{}"')], None),
        ("a <tool_cal", "a <tool_cal", [], None),
        ("a\n", "a\n", [], None),
    ],
)
def test_hermes_turns_that_are_not_whole(written, content, calls, error):
    """What was told stays told; a call without a name is no call; text behind calls is dropped."""
    turn, said = read(CHATML, CHATML.tokenizer.encode(written), [])
    assert (turn.content, spelled(turn)) == (content, calls)
    assert said is error if error is None else error in (said or "")


def test_a_call_ends_reasoning_that_was_not_closed():
    """vllm#32216: the call is a call, what came before it reasoning."""
    tokenizer = THINKING.tokenizer
    ids = tokenizer.encode("hm")
    ids += KIMI.assistant_turn("", [CallText("functions.f:0", "{}")])[0]
    turn, error = read(THINKING, ids, [])
    assert (turn.reasoning, turn.content, spelled(turn)) == ("hm", "", [("f", "{}")])
    assert error is None


def test_a_truncated_kimi_call_keeps_what_was_written():
    tokenizer = KIMI.tokenizer
    ids, _ = KIMI.assistant_turn("a", [CallText("functions.f:0", '{"x": 1}')])
    end = ids.index(tokenizer.special_id("<|tool_call_end|>"))
    turn, error = read(KIMI, ids[: end - 2], [])
    assert (turn.content, spelled(turn)) == ("a", [("f", '{"x": ')])
    assert error is not None and "truncated call" in error


def test_no_tools_no_calls():
    """Kimi's markers never show; where markers are text, a call is text."""
    ids, _ = KIMI.assistant_turn("a", [CallText("functions.f:0", "{}")])
    reader = turn_deltas(KIMI, calls=False)
    turn = fold([*reader.push(ids), *reader.finish()])
    assert (turn.content, turn.calls) == ("a", [])
    assert reader.error is not None
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = turn_deltas(CHATML, calls=False)
    turn = fold([*reader.push(CHATML.tokenizer.encode(written)), *reader.finish()])
    assert (turn.content, reader.error) == (written, None)


@FEW
@given(st.sampled_from(sorted(RENDERERS)), texts)
def test_plain_text_is_content(kind, text):
    renderer = RENDERERS[kind]
    if kind == "text":
        text = text.replace("<", "(")
    turn, error = read(renderer, [*renderer.tokenizer.encode(text), renderer.end_id], [])
    said = turn.reasoning if kind == "thinking" else turn.content
    assert (said, error) == (text, None)


def test_spelled_markers_are_data_in_kimi():
    text = "".join(SPECIAL_TOKENS)
    assert read(KIMI, KIMI.tokenizer.encode(text), [])[0].content == text


def test_a_qwen_marker_is_an_id():
    """With ids for calls a spelled marker is text."""
    ids = QWEN.tokenizer.encode("<tool_call>x")
    assert read(QWEN, ids, [])[0].content == "<tool_call>x"
    ids = ids_of('<tool_call>{"name": "f", "arguments": {}}</tool_call>', small_hf(True))
    assert spelled(read(QWEN, ids, [])[0]) == [("f", "{}")]
