"""Fitting a value to a schema: keys at any depth, strings of JSON, lossless types, enums."""

from typing import Any

import pytest

from sandbox.calls.arguments import parse_arguments
from sandbox.calls.distance import osa_within
from sandbox.calls.fit import fit
from sandbox.calls.policy import KeyTier
from sandbox.calls.schema import CompiledSchema
from sandbox.calls.types import CallError
from sandbox.calls.typos import is_typo
from sandbox.calls.words import are_aliases, bundled_words, tokens

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def fitted(value: Any, schema: dict[str, Any], tier: KeyTier = KeyTier.FUZZY) -> tuple[Any, list]:
    """Value and tags after fitting to the closed schema; validity is asserted by the caller."""
    found = fit(value, CompiledSchema(schema).closed, tier)
    return found.value, list(found.repairs)


def of(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with one property ``x``."""
    return {"type": "object", "properties": {"x": schema}}


@pytest.mark.parametrize(
    ("schema", "given", "wanted", "tag"),
    [
        ({"type": "integer"}, "3", 3, "coerce:x"),
        ({"type": "integer"}, "-12", -12, "coerce:x"),
        ({"type": "integer"}, 3.0, 3, "coerce:x"),
        ({"type": "number"}, "3.5", 3.5, "coerce:x"),
        ({"type": "number"}, "3", 3, "coerce:x"),
        ({"type": "number"}, "1e3", 1000.0, "coerce:x"),
        ({"type": "boolean"}, "true", True, "coerce:x"),
        ({"type": "boolean"}, "False", False, "coerce:x"),
        ({"type": ["integer", "null"]}, "null", None, "coerce:x"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4, "coerce:x"),
        ({"type": "array"}, "[1]", [1], "nested_json:x"),
        ({"type": "object"}, '{"a":1}', {"a": 1}, "nested_json:x"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1], "nested_json:x"),
        ({"enum": ["Fast", "slow"]}, "fast", "Fast", "enum:x"),
        ({"enum": ["one_way", "x"]}, "One-Way", "one_way", "enum:x"),
        ({"enum": ["北京"], "type": "string"}, "北京 ", "北京", "enum:x"),
        ({"const": "on"}, "ON", "on", "enum:x"),
        ({"enum": [1, 2]}, "2", 2, "coerce:x"),
        ({"type": "array", "items": {"type": "integer"}}, ["1", 2, "3"], [1, 2, 3], "coerce:x[]"),
    ],
)
def test_what_the_schema_asks_for(schema, given, wanted, tag):
    """Lossless, exactly one reading, with a tag."""
    value, tags = fitted({"x": given}, of(schema))
    assert value == {"x": wanted} and type(value["x"]) is type(wanted) and tags == [tag]
    assert CompiledSchema(of(schema)).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ({"type": "string"}, 3),
        ({"type": "string"}, "[1]"),
        ({"type": "integer"}, "3.5"),
        ({"type": "integer"}, "007"),
        ({"type": "integer"}, " 3"),
        ({"type": "integer"}, 3.5),
        ({"type": "integer"}, 1e300),
        ({"type": "integer"}, "٣"),
        ({"type": "number"}, "1e999"),
        ({"type": "number"}, "NaN"),
        ({"type": "boolean"}, "yes"),
        ({"type": "boolean"}, 1),
        ({"type": "array", "items": {"type": "integer"}}, 3),
        ({"type": "array"}, "1,2"),
        ({"type": "array"}, '{"a":1}'),
        ({"type": "object"}, "[1]"),
        ({"type": "object"}, '{"a":1,}'),
        ({"type": ["string", "array"]}, "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "x"),
        ({"enum": ["fast", "slow"]}, "fats"),
        ({"enum": ["a b", "a_b"]}, "A-B"),
        ({}, "3"),
    ],
)
def test_what_is_left_alone(schema, given):
    """Lossy, ambiguous or unasked: validation may complain, nothing is guessed."""
    value, tags = fitted({"x": given}, of(schema))
    assert value == {"x": given} and type(value["x"]) is type(given) and tags == []


@pytest.mark.parametrize(
    ("schema", "given", "wanted", "tags"),
    [
        (of(PLACE), {"x": {"City": "a"}}, {"x": {"city": "a"}}, ["key_style:x.City->city"]),
        (of({"type": "array", "items": PLACE}), {"x": [{"citty": "a"}, {"citty": "b"}]},
         {"x": [{"city": "a"}, {"city": "b"}]}, ["key_fuzzy:x[].citty->city"]),
        (of(PLACE), {"x": '{"城市":"a","days":"2"}'}, {"x": {"city": "a", "days": 2}},
         ["nested_json:x", "key_alias:x.城市->city", "coerce:x.days"]),
        ({"$defs": {"P": PLACE}, **of({"$ref": "#/$defs/P"})}, {"x": {"City": "a"}},
         {"x": {"city": "a"}}, ["key_style:x.City->city"]),
        ({"$defs": {"P": PLACE}, **of({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]})},
         {"x": {"City": "a"}}, {"x": {"city": "a"}}, ["key_style:x.City->city"]),
        ({"type": "object", "additionalProperties": PLACE}, {"Paris": {"City": "a"}},
         {"Paris": {"city": "a"}}, ["key_style:Paris.City->city"]),
        (of({"type": "array", "prefixItems": [PLACE]}), {"x": [{"City": "a"}]},
         {"x": [{"city": "a"}]}, ["key_style:x[].City->city"]),
    ],
)  # fmt: skip
def test_at_any_depth(schema, given, wanted, tags):
    """Through lists, references, simple unions, maps and strings that hold JSON."""
    assert fitted(given, schema) == (wanted, tags)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"city": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"city": {}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"city": {}}, "patternProperties": {"^x-": {}}},
        {"type": "object", "properties": {"city": {}}, "allOf": [{"properties": {"City": {}}}]},
        {"type": "object"},
    ],
)
def test_open_maps_are_not_matched(schema):
    """Headers, environments and metadata take any key."""
    assert fitted({"City": "a"}, schema) == ({"City": "a"}, [])
    assert CompiledSchema(schema).is_valid({"City": "a"})


def test_conditions_on_known_keys_do_not_open_an_object():
    """anyOf that only requires is no place for further keys."""
    schema = {**PLACE, "anyOf": [{"required": ["city"]}, {"required": ["days"]}]}
    assert fitted({"City": "a"}, schema)[0] == {"city": "a"}


@pytest.mark.parametrize("schema", [True, {"properties": {"a": True}}, {"$ref": "#"}])
def test_odd_schemas_do_no_harm(schema):
    """Boolean schemas and a reference to itself."""
    value = {"a": 1}
    assert fit(value, schema, KeyTier.FUZZY).value == {"a": 1}


def test_values_that_do_not_fit_take_the_key_back():
    """A renamed key whose value its property refuses is unknown after all."""
    schema = CompiledSchema({"type": "object", "properties": {"days": {"type": "integer"}}})
    found = parse_arguments('{"Days":"soon"}', schema)
    assert isinstance(found, CallError) and found.details == ("unknown:Days",)
    assert "did you mean 'days'?" in found.message


def test_tags_do_not_grow_with_the_argument():
    """A thousand different habits are thirty-two tags and one more."""
    names = [f"n{i}" for i in range(200)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    _, tags = fitted(dict.fromkeys(names, "1"), schema)
    assert len(tags) == 33 and tags[-1] == "more"


def test_many_unknown_keys_are_not_looked_at():
    """More than 64 of them, or one longer than 64 characters."""
    given = {f"citty{i}": 1 for i in range(65)}
    assert fitted(dict(given), PLACE) == (given, [])
    long = {"CITY" * 17: 1}
    assert fitted(dict(long), PLACE) == (long, [])


@pytest.mark.parametrize(
    ("key", "name", "typo"),
    [
        ("usernme", "user_name", True),
        ("user_nmae", "username", True),
        ("start_dat", "startdate", True),
        ("date_set", "dataset", False),
        ("user", "user_id", False),
        ("is_active", "active", False),
        ("theme", "time", False),
        ("state", "date", False),
        ("make", "name", False),
        ("yaw", "year", False),
        ("locations", "location", False),
        ("location_id", "location", False),
        ("importt", "export", False),
        ("descripton", "description", True),
        ("ip4", "ip6", False),
        ("x1", "x2", False),
        ("naïve_key", "naive_key", False),
        ("longtitude", "longitude", True),
        ("longtitude", "latitude", False),
        ("widht", "width", True),
        ("vs_currency", "to_currency", False),
        ("subtopic", "sub_topics", False),
        ("stat", "start", False),
        ("hight", "height", True),
    ],
)
def test_typos(key: str, name: str, typo: bool):
    """Real words, extra words, plurals, digits and short names are no typos."""
    assert is_typo(key, name, frozenset()) == typo


def test_words_of_other_tools_are_no_typos():
    """A parameter of the loaded tools is a name, however close it is to another."""
    assert is_typo("widht", "width", frozenset())
    assert not is_typo("widht", "width", frozenset(("widht",)))


@pytest.mark.parametrize(
    ("a", "b", "limit", "distance"),
    [
        ("", "", 0, 0), ("ab", "ba", 1, 1), ("ab", "ba", 0, None), ("abc", "ca", 3, 3),
        ("kitten", "sitting", 2, None), ("kitten", "sitting", 3, 3), ("abcd", "acbd", 2, 1),
        ("citty", "city", 1, 1), ("a" * 64, "b" * 64, 2, None), ("abc", "abcde", 1, None),
    ],
)  # fmt: skip
def test_distance(a: str, b: str, limit: int, distance: int | None):
    """Optimal string alignment: each piece is edited once, so "ca" to "abc" takes three."""
    assert osa_within(a, b, limit) == osa_within(b, a, limit) == distance


def test_tokens():
    """Camel humps, separators, width, digits and scripts."""
    assert tokens("getHTTPResponse2") == ("get", "http", "response", "2")
    assert tokens("START-DATE") == ("start", "date")
    assert tokens("ｕｓｅｒ名") == ("user", "名")
    assert tokens("__") == ()


def test_the_bundled_data():
    """Words are lower-case ASCII; every group of the table holds for its first and last name."""
    words = bundled_words()
    assert len(words) > 1000 and all(w.isascii() and w.isalpha() and w.islower() for w in words)
    assert (
        are_aliases("城市", "city")
        and are_aliases("filePath", "path")
        and are_aliases("q", "query")
    )
    assert not are_aliases("city", "country") and not are_aliases("", "")
