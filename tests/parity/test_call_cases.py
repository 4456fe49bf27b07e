"""Golden calls through both halves: the finder of engine.chat, then the decoder of the sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.chat.calls import find_calls, find_calls_in_text
from engine.chat.markers import ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END
from engine.chat.tokenizers import ByteTokenizer
from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, DecodedCall
from sandbox.session import RawCall
from sandbox.tool_spec import ToolSpec

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "cases" / "calls.json").read_text())
TOKENIZER = ByteTokenizer(("functions.", '{"key":"', '"}'))
TOOLS = ToolTable([ToolSpec(name) for name in GOLDEN["tools"]])
REPAIRED = {5, 6, 12, 13, 14, 18, 19, 20, 21, 23}
"""Cases that are right only after a repair; each must say so."""


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_text_to_call(case: dict[str, Any]):
    """Every golden case gives its calls, or its error from the half that can see it."""
    turn = find_calls_in_text(case["text"], TOKENIZER)
    found = [
        decode(RawCall(c.name_text, c.arguments_text, finish_reason=case["finish_reason"]), TOOLS)
        for c in turn.calls
    ]
    if "calls" in case:
        assert turn.error is None
        calls = [call for call in found if isinstance(call, DecodedCall)]
        assert len(calls) == len(found)
        assert [{"name": c.tool, "arguments": c.arguments} for c in calls] == case["calls"]
        assert any(call.repairs for call in calls) == (case["id"] in REPAIRED)
        return
    errors = [error for error in found if isinstance(error, CallError)]
    assert len(errors) == len(found), "no call of such a turn may run"
    named = {error.code.value for error in errors} | {d for e in errors for d in e.details}
    if not errors:
        assert turn.error is not None and turn.error.startswith("truncated")
        named.add("truncated")
    assert case["error"] in named


def test_marker_text_in_an_argument_is_data_on_ids():
    """Case 10 on token ids: the spelled marker is part of the argument and the call is whole."""
    arguments = json.dumps({"c": f"echo {CALL_END}"})
    special = TOKENIZER.special_id
    ids = [special(SECTION_BEGIN), special(CALL_BEGIN), *TOKENIZER.encode("functions.exec:1")]
    ids += [special(ARGUMENT_BEGIN), *TOKENIZER.encode(arguments), special(CALL_END)]
    turn = find_calls([*ids, special(SECTION_END)], TOKENIZER)
    assert turn.error is None
    [call] = turn.calls
    found = decode(RawCall(call.name_text, call.arguments_text), TOOLS)
    assert found == DecodedCall("exec", {"c": f"echo {CALL_END}"})
