"""JSON as models write it: what is refused, what is mended, what is left alone."""

import json

import pytest

from sandbox.calls.json_text import MAX_BYTES, JsonProblem, JsonText, read_json


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ('{"key": NaN}', "non_finite", "NaN is not a JSON number"),
        ('{"key": -Infinity}', "non_finite", "-Infinity is not a JSON number"),
        ('{"key": 1e999}', "non_finite", "too large"),
        ('{"key": 1, "key": 2}', "duplicate_key", "key 'key' is given twice"),
        ('{"key": 1, "key": true}', "duplicate_key", "key 'key' is given twice"),
        ('{"key": "a"} x', "syntax", "Extra data"),
        ('{"key": "a"}}', "syntax", "Extra data"),
        ("{'key': 1}", "syntax", "not valid JSON"),
        ('{"key": 1 "b": 2}', "syntax", "not valid JSON"),
        ('{"key": [1, 2}', "syntax", "not valid JSON"),
        ('{"key": "a', "truncated_in_string", "inside a string"),
        ('{"key": "a\\"}', "truncated_in_string", "inside a string"),
        ('{"key": 1,', "truncated", ""),
        ('{"key":', "truncated", ""),
        ('{"key": tru', "syntax", "not valid JSON"),
        ('{"key": "\\ud800"}', "surrogate", "surrogate"),
        ('{"key": "\ud800"}', "surrogate", "surrogate"),
        ('{"key": ' + "9" * 5000 + "}", "number_too_long", "too many digits"),
        ("[" * 33 + "]" * 33, "too_deep", "nested 33 deep"),
        ("[" * 500_000, "too_deep", "nested 500000 deep"),
        ("{" + ",".join(f'"k{i}":1' for i in range(257)) + "}", "too_many_keys", "257 keys"),
        ('{"key": "' + "a" * MAX_BYTES + '"}', "too_long", "longer than"),
        ('{"key": "' + "城" * (MAX_BYTES // 2) + '"}', "too_long", "longer than"),
    ],
)
def test_bad_json_is_refused_with_a_short_reason(text: str, reason: str, said: str, repair: bool):
    """Everything Python's parser is too kind about, the limits, and what nobody can mend."""
    found = read_json(text, repair=repair)
    assert isinstance(found, JsonProblem)
    assert found.reason == reason or (not repair and found.reason in ("syntax", "truncated"))
    assert said in found.message and len(found.message) < 200 and "\n" not in found.message


@pytest.mark.parametrize(
    ("text", "value", "tags"),
    [
        ("", {}, ["empty"]),
        (" \n", {}, ["empty"]),
        ("\ufeff{}", {}, ["bom"]),
        ('```json\n{"a":1}\n```', {"a": 1}, ["fence"]),
        ('```{"a":1}```', {"a": 1}, ["fence"]),
        ('\n```\n{"a":"```"}\n```\n', {"a": "```"}, ["fence"]),
        ('{"a":[1,2,],}', {"a": [1, 2]}, ["trailing_comma"]),
        ('{"a":"b,}","c":"d,]", \n }', {"a": "b,}", "c": "d,]"}, ["trailing_comma"]),
        ('{"a":True,"b":None,"c":"True"}', {"a": True, "b": None, "c": "True"}, ["python_literal"]),
        ('{"a":{"b":1}', {"a": {"b": 1}}, ["missing_closer"]),
        ('{"a":[{"b":[', {"a": [{"b": []}]}, ["missing_closer"]),
        ('{"a":[1,2', {"a": [1, 2]}, ["missing_closer"]),
        ('{"a":"x\ny\t"}', {"a": "x\ny\t"}, ["control_characters"]),
        ('"{\\"a\\": 1}"', {"a": 1}, ["double_encoded"]),
        (json.dumps(json.dumps('{"a": 1}')), {"a": 1}, ["double_encoded"]),
        ('"{\\"a\\": 1,}"', {"a": 1}, ["trailing_comma", "double_encoded"]),
        ('{"a":1,"a":1}', {"a": 1}, ["duplicate_key"]),
        ('```\n{"a":[True,"b\nc",],', None, []),
        ('{"a":[True,"b\nc",]', {"a": [True, "b\nc"]}, ["python_literal", "trailing_comma",
                                                        "missing_closer", "control_characters"]),
    ],
)  # fmt: skip
def test_repairs(text: str, value: object, tags: list[str]):
    """The allowed repairs, alone and together, each with its tag; none without ``repair``."""
    found = read_json(text, repair=True)
    if value is None:
        assert isinstance(found, JsonProblem)
        return
    assert isinstance(found, JsonText) and found.value == value
    assert sorted(found.repairs) == sorted(f"json:{tag}" for tag in tags)
    strict = read_json(text, repair=False)
    assert isinstance(strict, JsonProblem) or isinstance(strict.value, str)


@pytest.mark.parametrize(
    "text",
    [
        '{"key":"\\ud83d\\ude00"}',
        '{"key":"[[[{{{"}',
        '{"key":"\\"]"}',
        ' {"key":"a"}\n',
        '{"key":"True, None, ```"}',
        "[" * 32 + "]" * 32,
        "[" + ",".join(["[]"] * 99) + "]",
    ],
)
def test_good_json_is_read_as_it_is(text: str):
    """Escaped pairs, brackets and quotes inside strings, outer white space."""
    for repair in (True, False):
        assert read_json(text, repair=repair) == JsonText(json.loads(text))


def test_a_string_is_decoded_twice_at_most():
    """A third layer is data."""
    text = json.dumps(json.dumps(json.dumps("{}")))
    found = read_json(text, repair=True)
    assert isinstance(found, JsonText) and found.value == "{}"


def test_plain_words_are_a_string():
    """Only what looks like a value is decoded again."""
    found = read_json('"hello there"', repair=True)
    assert isinstance(found, JsonText) and (found.value, found.repairs) == ("hello there", ())


def test_nothing_is_closed_for_a_writer_that_was_cut_off():
    """``truncated``: where the text stops says nothing about its end."""
    found = read_json('{"a":{"b":1}', repair=True, truncated=True)
    assert isinstance(found, JsonProblem) and found.reason == "truncated"
    whole = read_json('{"a":1}', repair=True, truncated=True)
    assert isinstance(whole, JsonText) and whole.repairs == ()
