"""HermesFinder: ids decide where they can, else text outside of JSON strings; nothing raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import CallText
from engine.chat.hermes import HermesFinder
from tests.engine.chat.dialogues import CALL_MARKERS, CHATML_MARKERS, ids_of, plain, small_hf

IDS, TEXT = small_hf(), small_hf(call_markers=False)
OPEN, CLOSE, END = "<tool_call>", "</tool_call>", "<|im_end|>"
ONE = f'{OPEN}\n{{"name": "exec", "arguments": {{"c": "ls"}}}}\n{CLOSE}'
LS = CallText("exec", '{"c": "ls"}')
both = pytest.mark.parametrize("tokenizer", [IDS, TEXT], ids=["ids", "text"])

marked_text = st.lists(
    st.one_of(
        plain, st.sampled_from((*CALL_MARKERS, *CHATML_MARKERS, ONE, '"', "\\", '{"name": "'))
    )
).map("".join)


def found(text: str, tokenizer):
    return HermesFinder(tokenizer).find(ids_of(text, tokenizer))


@both
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{ONE}{END}", "", [LS]),
        (f"let me see\n{ONE}{END}", "let me see", [LS]),
        (f"let me see {ONE}\n{ONE}", "let me see ", [LS, LS]),
        (f"{ONE} dropped {END} never read {OPEN}", "", [LS]),
        (f"{ONE}<|endoftext|>{ONE}", "", [LS]),
        (
            f'{OPEN}{{"arguments": {{"c": "ls"}}, "name": "exec"}}{CLOSE}',
            "",
            [LS],
        ),
        (f'{OPEN}{{"name": "exec", "parameters": {{"c": "ls"}}}}{CLOSE}', "", [LS]),
        (f'{OPEN}{{"name": "exec"}}{CLOSE}', "", [CallText("exec", "")]),
        (
            f'{OPEN}{{"name": "exec", "arguments": {{"c": "ls"}}, "id": 3}}{CLOSE}',
            "",
            [LS],
        ),
        (
            f'{OPEN}{{"name": "exec", "arguments": {{"c": "ls",}}}}{CLOSE}',
            "",
            [CallText("exec", '{"c": "ls",}')],
        ),
        (f'{OPEN}{{"name": "a\\"b", "arguments": "{{}}"}}{CLOSE}', "", [CallText('a"b', '"{}"')]),
        ('Use {"name":"exec","arguments":{}}', 'Use {"name":"exec","arguments":{}}', []),
        ("5\n", "5\n", []),
        ("", "", []),
    ],
)
def test_well_formed(tokenizer, text, content, calls):
    """The canonical form and every accepted variant."""
    turn = found(text, tokenizer)
    assert (turn.error, turn.text, list(turn.calls)) == (None, content, calls)


CUT = f'{OPEN}\n{{"name": "exec", "arguments": {{"c": "l'


@both
@pytest.mark.parametrize(
    ("text", "num_calls", "error", "unread"),
    [
        (CUT, 0, "truncated", CUT),
        (f"{ONE}\n{CUT}{END}", 1, "truncated", CUT),
        (f"{OPEN}ls{CLOSE} x", 0, "a call that is not", f"{OPEN}ls{CLOSE} x"),
        (f"{OPEN}[1]{CLOSE}", 0, "a call that is not", f"{OPEN}[1]{CLOSE}"),
        (f'{OPEN}{{"name": 1}}{CLOSE}', 0, "a call that is not", f'{OPEN}{{"name": 1}}{CLOSE}'),
        (f"{ONE} and {ONE} x", 1, "text 'and' between two calls", f" and {ONE} x"),
        (f"a<|im_start|>b{END}c", 0, "<|im_start|> inside", "<|im_start|>b"),
        (f"{OPEN}a<|im_start|>b", 0, "<|im_start|> inside", f"{OPEN}a<|im_start|>b"),
    ],
)
def test_malformed(tokenizer, text, num_calls, error, unread):
    """What does not fit is named and kept; whole calls before it stand, none after it runs."""
    turn = found(text, tokenizer)
    assert turn.error is not None
    assert error in turn.error
    assert (len(turn.calls), turn.unread) == (num_calls, unread)


@pytest.mark.parametrize("text", [f"5{CLOSE}", f"{ONE}{CLOSE}", f"{OPEN}{OPEN}{{}}{CLOSE}"])
def test_marker_ids_in_the_wrong_place(text):
    """Only ids can stand in the wrong place: spelled, they are text."""
    turn = found(text, IDS)
    assert turn.error is not None and "in the wrong place" in turn.error


@both
def test_a_marker_inside_a_string_is_data(tokenizer):
    """On ids always, on text because it is JSON (vllm#45167)."""
    call = CallText("exec", f'{{"c": "echo \\"{CLOSE}\\\\"}}')
    spelled = f'\n{{"name": "exec", "arguments": {call.arguments_text}}}\n'
    ids = ids_of(OPEN, tokenizer) + tokenizer.encode(spelled) + ids_of(CLOSE, tokenizer)
    turn = HermesFinder(tokenizer).find(ids)
    assert (turn.error, turn.calls) == (None, (call,))


@both
@given(text=marked_text, size=st.integers(1, 8))
def test_pieces_of_any_size_agree(tokenizer, text, size):
    """Streaming finds what the whole finds; each call is reported once, when it is complete."""
    ids = ids_of(text, tokenizer)
    finder = HermesFinder(tokenizer)
    reader = finder.stream()
    streamed = []
    for start in range(0, len(ids), size):
        streamed += reader.push(ids[start : start + size])
    whole = finder.find(ids)
    assert reader.finish() == whole
    assert tuple(streamed) == whole.calls
    if tokenizer is IDS:
        fields = [whole.text, *(p for c in whole.calls for p in (c.name_text, c.arguments_text))]
        assert not any(marker in field for field in fields for marker in CHATML_MARKERS)


def test_a_large_argument_is_read_in_linear_time():
    """A file of 40,000 characters, token by token."""
    content = "x\\n\\" * 10_000 + "\\"
    ids = ids_of(f'{OPEN}{{"name": "write", "arguments": {{"c": "{content}"}}}}{CLOSE}', TEXT)
    reader = HermesFinder(TEXT).stream()
    for token_id in ids:
        reader.push([token_id])
    assert reader.finish().calls == (CallText("write", f'{{"c": "{content}"}}'),)
