"""The call finder: ids decide, nothing leaks, nothing raises, pieces of any size agree."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import CallText
from engine.chat.calls import CallFinder, find_calls, find_calls_in_text, ids_of_marked_text
from engine.chat.markers import SINGULAR_SECTION, SPECIAL_TOKENS
from engine.chat.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer(("functions.", '{"key":"', '"}'))
STRUCTURE = [
    name for name in (*SPECIAL_TOKENS, *SINGULAR_SECTION) if "tool_call" in name or name == "[PAD]"
]
SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CB, AB, CE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
END = "<|im_end|>"
ONE = f'{CB}functions.exec:0{AB}{{"c":"ls"}}{CE}'
LS = CallText("functions.exec:0", '{"c":"ls"}')

marked_text = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from((*SPECIAL_TOKENS, *SINGULAR_SECTION)))
).map("".join)


def found(text: str):
    return find_calls_in_text(text, TOKENIZER)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{SB}{ONE}{SE}{END}", "", [LS]),
        (f"let me see {SB}{ONE}{SE}{END}", "let me see ", [LS]),
        (f"{SB}{ONE}{ONE}{SE}", "", [LS, LS]),
        (f"{SB}\n{ONE}\n{ONE}\n{SE}", "", [LS, LS]),
        (f"{ONE}{END}", "", [LS]),
        (f"ok {ONE} bye", "ok ", [LS]),
        (f"{SB}{ONE}{END}", "", [LS]),
        (f"{SB}{ONE}{SE} dropped {END} never read {SB}", "", [LS]),
        (f"<|tool_call_section_begin|>{ONE}<|tool_call_section_end|>", "", [LS]),
        (f"{SB}{ONE}{SE}{SB}{ONE}{SE}", "", [LS, LS]),
        (f"{CB}functions.exec:5\n{AB}\n{{}}\n{CE}", "", [CallText("functions.exec:5", "\n{}\n")]),
        (f"{CB}a.b-c{AB}{CE}", "", [CallText("a.b-c", "")]),
        (f'{CB}f:0{AB}{{"c":"<think>"}}{CE}', "", [CallText("f:0", '{"c":"<think>"}')]),
        ('Use {"name":"exec","arguments":{}}', 'Use {"name":"exec","arguments":{}}', []),
        ("", "", []),
        ("5<|im_end|>", "5", []),
        ("5", "5", []),
    ],
)
def test_well_formed(text, content, calls):
    """The canonical form and every accepted variant."""
    turn = found(text)
    assert turn.error is None
    assert (turn.text, list(turn.calls)) == (content, calls)


CUT = f'{CB}functions.exec:1{AB}{{"c":"ls","d":{{"e":1'


@pytest.mark.parametrize(
    ("text", "num_calls", "error", "unread"),
    [
        (f"{SB}{CUT}", 0, "truncated", CUT),
        (f"{SB}{CB}functions.exec:1", 0, "truncated", f"{CB}functions.exec:1"),
        (f"{SB}{ONE}{CUT}", 1, "truncated", CUT),
        (f"{SB}{CB}f:1{AB}{{}}{SE}{END}", 0, "truncated", f"{CB}f:1{AB}{{}}{SE}"),
        (f"{SB}{CB}f:1{AB}{{}}{END}", 0, "truncated", f"{CB}f:1{AB}{{}}"),
        (f"{SB}{CB}f:1{AB}{{}}{ONE}{SE}", 0, "truncated", f"{CB}f:1{AB}{{}}{ONE}{SE}"),
        (f"{SB}{CB}f:1{CE}{SE}", 0, f"where {AB} was expected", f"{CB}f:1{CE}{SE}"),
        (f"{SB}{CE}{SE}", 0, "no call is open", f"{CE}{SE}"),
        (f"{SB}{AB}{{}}{CE}{SE}", 0, "no call is open", f"{AB}{{}}{CE}{SE}"),
        (f"{SB}{SB}{ONE}{SE}", 0, "no call is open", f"{SB}{ONE}{SE}"),
        (f"{SB}{SE}", 0, "no call is open", SE),
        (f"{SB}{END}", 0, "section without a call", SB),
        (f"{SB}5{END}", 0, "text '5' between", "5"),
        (f"5{SE}", 0, "no call is open", SE),
        (f"{SB}{ONE} and {ONE}{SE}", 1, "text 'and' between", f" and {ONE}{SE}"),
        (f"{SB}{ONE} end", 1, "text 'end' between", " end"),
        (f'{SB}{CB}f{AB}{{"c":"{CE}"}}{CE}{SE}', 1, "no call is open", f"{CE}{SE}"),
        ("5<|im_user|>6", 0, "inside an assistant turn", "<|im_user|>6"),
        (f"{CB}f{AB}[PAD]{CE}", 0, "inside an assistant turn", f"[PAD]{CE}"),
        (f"{SB}<think>{ONE}{SE}", 0, "wrong place", f"<think>{ONE}{SE}"),
    ],
)
def test_malformed(text, num_calls, error, unread):
    """What does not fit is named and kept; whole calls before it stand, none after it runs."""
    turn = found(text)
    assert turn.error is not None
    assert error in turn.error
    assert len(turn.calls) == num_calls
    assert turn.unread == unread


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>hm</think>5", "hm", "5"),
        ("hm</think>5", "hm", "5"),
        (f"<think>hm{SB}{ONE}{SE}", "hm", ""),
        ("<think>hm", "hm", ""),
    ],
)
def test_reasoning(text, reasoning, content):
    """Reasoning is kept out of the content, also where the header opened it or nobody closed it."""
    turn = found(text)
    assert (turn.reasoning, turn.text, turn.error) == (reasoning, content, None)


def test_marker_text_in_an_argument_is_data_on_ids():
    """Case 10 of the golden list: on ids the spelled marker is part of the argument."""
    call = CallText("functions.exec:1", f'{{"c":"echo {CE}"}}')
    special = TOKENIZER.special_id
    ids = [special(SB), special(CB), *TOKENIZER.encode(call.name_text), special(AB)]
    ids += [*TOKENIZER.encode(call.arguments_text), special(CE), special(SE), special(END)]
    assert find_calls(ids, TOKENIZER).calls == (call,)
    assert find_calls(ids, TOKENIZER).error is None


@given(marked_text, st.integers(1, 8))
def test_pieces_of_any_size_agree(text, size):
    """Streaming finds what the whole finds; each call is reported once, when it is complete."""
    ids = ids_of_marked_text(text, TOKENIZER)
    reader = CallFinder(TOKENIZER).stream()
    streamed = []
    for start in range(0, len(ids), size):
        streamed += reader.push(ids[start : start + size])
    whole = find_calls(ids, TOKENIZER)
    assert reader.finish() == whole
    assert tuple(streamed) == whole.calls


@given(marked_text)
def test_nothing_raises_and_no_marker_leaks(text):
    """Whatever the policy wrote, structure markers are in no field (spelled singular ones too)."""
    turn = found(text)
    fields = [turn.text, turn.reasoning]
    fields += [part for call in turn.calls for part in (call.name_text, call.arguments_text)]
    assert not any(marker in field for field in fields for marker in STRUCTURE)


GOLDEN = Path(__file__).parents[2] / "data" / "cases" / "calls.json"


def test_golden_cases_extract():
    """Every golden case: as many calls as expected, or an error here or for the JSON decoder."""
    for case in json.loads(GOLDEN.read_text())["cases"]:
        turn = found(case["text"])
        if "calls" in case:
            assert turn.error is None, case["id"]
            assert len(turn.calls) == len(case["calls"]), case["id"]
        elif case["error"].startswith("truncated"):
            assert turn.error is not None, case["id"]
        else:
            assert len(turn.calls) == 1, case["id"]
