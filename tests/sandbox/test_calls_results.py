"""Reading answers against the schema a tool declares."""

import json
from typing import Any

import pytest

from sandbox.calls.results import ReadResult, UnparsedResult, read_result
from sandbox.calls.schema import CompiledSchema

WEATHER = {
    "type": "object",
    "properties": {
        "城市": {"type": "string"},
        "温度": {"type": "number"},
        "预报": {"type": "array", "items": {"type": "object", "properties": {"湿度": {}}}},
    },
    "required": ["城市", "温度"],
}


def read(answer: Any, schema: dict[str, Any] = WEATHER, **more: Any):
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return read_result(text, CompiledSchema(schema, close=False), **more)


def test_an_author_who_writes_chinese_is_served_by_an_english_api():
    """By the alias table, at any depth; the distance between the two is no help."""
    found = read({"city": "北京", "temperature": "21.5", "forecast": [{"humidity": 3}], "ts": 1})
    assert isinstance(found, ReadResult)
    assert found.value == {"城市": "北京", "温度": 21.5, "预报": [{"湿度": 3}], "ts": 1}
    assert json.loads(found.text) == found.value and "城市" in found.text
    assert found.repairs == (
        *("result:key_alias:city->城市", "result:key_alias:temperature->温度"),
        *("result:key_alias:forecast->预报", "result:coerce:温度"),
        "result:key_alias:预报[].humidity->湿度",
    )


def test_and_the_other_way_round():
    """An English author, a Chinese API."""
    schema = {"type": "object", "properties": {"city": {}, "temperature": {}}}
    found = read({"城市": "a", "温度": 1}, schema)
    assert isinstance(found, ReadResult) and found.value == {"city": "a", "temperature": 1}


def test_what_fits_is_not_touched():
    """Further keys are the API's business."""
    answer = {"城市": "a", "温度": 1, "more": [1, "2"]}
    assert read(answer) == ReadResult(answer)
    assert read("plain words", {"type": "string"}) == ReadResult("plain words")
    assert read([1, 2], {"type": "array"}) == ReadResult([1, 2])
    assert read('"[1]"', {"type": ["string", "null"]}) == ReadResult("[1]")
    assert read('{"n": 3.0}', {"properties": {"n": {"type": "integer"}}}) == ReadResult({"n": 3.0})


def test_declared_aliases_come_first():
    """The author knows the API."""
    found = read({"t2m": 3, "城市": "a"}, aliases={"温度": ("t2m",)})
    assert isinstance(found, ReadResult) and found.value == {"城市": "a", "温度": 3}


def test_a_filled_key_is_never_overwritten():
    """What the API also calls temperature stays beside the declared 温度."""
    answer = {"城市": "a", "温度": 1, "temperature": 2}
    assert read(answer) == ReadResult(answer)


def test_an_optional_key_of_the_wrong_type_is_left_as_it_came():
    """Undoing the match is enough where nothing is missing."""
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    found = read({"Count": "many"}, schema)
    assert isinstance(found, ReadResult) and found.value == {"Count": "many"}
    assert found.repairs == ()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("<html>", "the answer is not JSON that can be read (syntax)"),
        ('{"city": NaN}', "(non_finite)"),
        ({"city": "a"}, "missing key '温度'"),
        ({"city": "a", "temperature": "warm"}, "missing key '温度'"),
        ([], "the answer: expected object, got an array"),
    ],
)
def test_an_answer_that_does_not_fit_is_one_line(answer: Any, said: str):
    """What is wrong, for the episode's record."""
    found = read(answer)
    assert isinstance(found, UnparsedResult)
    assert said in found.message and "\n" not in found.message
