"""Schemas, expressions and grammars as constraints, followed at random without a model."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import numpy as np
import pytest

from engine.chat.base import Tokenizer
from engine.chat.tokenizers import ByteTokenizer
from engine.chat.vocabulary import Vocabulary
from engine.constrain.constrainer import Constrainer
from engine.constrain.hints import shortest_match
from engine.errors import ConstraintError, NotSupportedError
from engine.runtime.types import Constraint, ContextId, StepRequest
from tests.engine.chat.dialogues import small_hf, small_kimi
from tests.engine.constrain.schemas import SCHEMAS, STR, obj

BYTES = ByteTokenizer()
CONSTRAINER = Constrainer(Vocabulary.of(BYTES), BYTES.vocab_size)


def follow(
    constraint: Constraint,
    seed: int,
    limit: int = 120,
    constrainer: Constrainer = CONSTRAINER,
    tokenizer: Tokenizer = BYTES,
    stop_ids: tuple[int, ...] = (),
) -> str:
    """A text drawn evenly from what the masks allow, without the token that ended it."""
    request = StepRequest(ContextId("c"), limit, constraint=constraint, stop_ids=stop_ids)
    guide = constrainer.guide(request)
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for left in range(limit, 0, -1):
        allowed = np.flatnonzero(np.unpackbits(guide.mask(left), bitorder="little"))
        token = guide.advance(int(random.choice(allowed)), left - 1)
        if token in guide.end_ids:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError(f"no end within {limit}: {tokenizer.decode(ids)!r}")


@pytest.mark.parametrize("name", ["weather", "recursive tree", "one any_of", "all of a ref"])
def test_json_schema(name: str):
    """The text is a value of the schema, with free white space."""
    validator = jsonschema_rs.validator_for(SCHEMAS[name])
    for seed in range(6):
        text = follow(Constraint("json_schema", json.dumps(SCHEMAS[name])), seed, 160)
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, {"type": "array"}])
def test_open_schemas_give_json_that_readers_take(schema):
    """No number runs to infinity, no string holds half a character."""
    for seed in range(8):
        value = json.loads(follow(Constraint("json_schema", json.dumps(schema)), seed))
        assert json.loads(json.dumps(value, allow_nan=False).encode()) == value


@pytest.mark.parametrize("pattern", [r"[a-z]{3}\d+(foo|barbaz)", r"(\d{3}-)?x+y", "é中?", r"a\/b"])
def test_regex(pattern: str):
    """The whole text matches; a digit is one of ten."""
    for seed in range(6):
        text = follow(Constraint("regex", pattern), seed, 40)
        assert re.fullmatch(pattern, text, re.ASCII), text


def test_grammar():
    """A Lark grammar that is not regular."""
    for seed in range(6):
        text = follow(Constraint("grammar", 'start: "a" start "b" | "c"\n'), seed, 30)
        a = text.index("c")
        assert text == "a" * a + "c" + "b" * a


@pytest.mark.parametrize("tokenizer", [small_kimi(), small_hf()], ids=["ranks", "hub"])
def test_tokens_of_many_bytes(tokenizer: Tokenizer):
    """Tokens may reach over the borders of strings, and an ending is counted in tokens."""
    constrainer = Constrainer(Vocabulary.of(tokenizer), tokenizer.vocab_size + 7)
    constraint = Constraint("json_schema", json.dumps(SCHEMAS["weather"]))
    validator = jsonschema_rs.validator_for(SCHEMAS["weather"])
    guide = constrainer.guide(StepRequest(ContextId("c"), 200, constraint=constraint))
    assert guide.shortest < len('{"location":""}') + 1
    for seed in range(4):
        text = follow(constraint, seed, 80, constrainer, tokenizer)
        assert validator.is_valid(json.loads(text)), text
    text = follow(constraint, 0, guide.shortest, constrainer, tokenizer)
    assert validator.is_valid(json.loads(text))


def test_a_stop_id_may_be_a_marker_only():
    """An ordinary token would cut the text; of several ends, only those the caller names."""
    end = BYTES.special_id("<|im_end|>")
    constraint = Constraint("regex", "[a-z]{1,4}")
    assert re.fullmatch("[a-z]{1,4}", follow(constraint, 0, 10, stop_ids=(end,)))
    guide = CONSTRAINER.guide(
        StepRequest(ContextId("c"), 2, stop_ids=(end,), constraint=constraint)
    )
    guide.advance(ord("a"), 1)
    np.testing.assert_array_equal(guide.mask(1), guide.only(end))
    with pytest.raises(ConstraintError, match="stop id 44 is an ordinary token"):
        follow(constraint, 0, 10, stop_ids=(end, ord(",")))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"uniqueItems": True, "type": "array"}, "json_schema: keyword 'uniqueItems'"),
        (obj({"a": {"not": STR}}), r"json_schema\.properties\.a: keyword 'not'"),
        (obj({"a": {"anyOf": [{"if": {}}]}}), r"a\.anyOf\[0\]: keyword 'if'"),
        ({"dependentRequired": {"a": ["b"]}}, "keyword 'dependentRequired'"),
        ({"propertyNames": {"pattern": "a"}}, "keyword 'propertyNames'"),
        ({"type": "array", "contains": STR}, "keyword 'contains'"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "maxlength": 3}, "keyword 'maxlength'"),
        ({"type": "string", "format": "no-such-format"}, "no-such-format"),
        ({"type": "string", "pattern": "(?=a)b"}, "constraint json_schema"),
        ({"$ref": "https://example.com/schema"}, "constraint json_schema"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "constraint json_schema"),
        (False, "the schema is false"),
        ({"properties": 3}, "expected a mapping"),
        ({"anyOf": {}}, "expected a list"),
        ([], "expected a JSON schema"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema, words: str):
    """Never ignored: the error names the keyword and where it stands, in one line."""
    constraint = Constraint("json_schema", json.dumps(schema))
    with pytest.raises(ConstraintError, match=words) as caught:
        CONSTRAINER.guide(StepRequest(ContextId("c"), 100, constraint=constraint))
    assert "\n" not in str(caught.value)


TOOL = {"name": "f", "parameters": obj({})}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        (json.dumps({"tools": []}), "at least one"),
        (json.dumps({"tools": [TOOL], "other": 1}), "nothing beside"),
        (json.dumps({"tools": [{"function": {}}]}), r"tools\[0\] has no name"),
        (json.dumps({"tools": [TOOL, TOOL]}), "two tools are named 'f'"),
        (json.dumps({"tools": [TOOL], "choice": {"name": "g"}}), "choice names 'g'"),
        (json.dumps({"tools": [TOOL], "choice": "none"}), "choice 'none'"),
        (json.dumps({"tools": [TOOL], "style": "xml"}), "style='xml'"),
        (json.dumps({"tools": [TOOL], "max_calls": 0}), "max_calls=0"),
        (
            json.dumps({"tools": [{"name": "f", "parameters": {"not": {}}}]}),
            "tool f: keyword 'not'",
        ),
    ],
)
def test_tool_calls_that_make_no_sense(text: str, words: str):
    """One line says what was expected."""
    with pytest.raises(ConstraintError, match=words):
        CONSTRAINER.guide(
            StepRequest(ContextId("c"), 99, constraint=Constraint("tool_calls", text))
        )


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "(a"), ("grammar", "start: b"), ("grammar", "start: start")]
)
def test_expressions_and_grammars_that_do_not_compile(kind, text: str):
    """The library's first line is passed on."""
    with pytest.raises(ConstraintError, match=f"constraint {kind}"):
        CONSTRAINER.guide(StepRequest(ContextId("c"), 99, constraint=Constraint(kind, text)))


def test_formats_need_their_markers():
    """Kimi's section has no spelling in text."""
    tokenizer = small_hf()
    constrainer = Constrainer(Vocabulary.of(tokenizer), tokenizer.vocab_size)
    constraint = Constraint("tool_calls", json.dumps({"tools": [TOOL]}))
    with pytest.raises(NotSupportedError, match=r"lacks <\|tool_calls_section_begin\|>"):
        constrainer.guide(StepRequest(ContextId("c"), 99, constraint=constraint))
    with pytest.raises(NotSupportedError, match="do not belong together"):
        Constrainer(Vocabulary.of(tokenizer), 10)


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [
        ("^[A-Z]{3}-[0-9]{2}$", "AAA-00"),
        ("foo|quux", "foo"),
        ("(ab|c)+d?", "c"),
        (r"\w\s[^a]", "a 0"),
        (r"^\d{2,5}$", "00"),
        ("(?=x)y", None),
        ("(", None),
    ],
)
def test_hints(pattern: str, shortest: str | None):
    """A text that the pattern matches, or None."""
    assert shortest_match(pattern) == shortest


def test_vocabularies():
    """Bytes of every id; markers and holes are special; ends are those of the formats."""
    vocabulary = Vocabulary.of(BYTES)
    assert len(vocabulary) == BYTES.vocab_size and vocabulary.bytes_of(200) == b"\xc8"
    assert vocabulary.bytes_of(len(vocabulary) + 3) == b""
    assert vocabulary.eos_ids == (BYTES.special_id("<|im_end|>"), BYTES.special_id("[EOS]"))
    assert vocabulary.special_names["<think>"] == BYTES.special_id("<think>")
    hub = Vocabulary.of(small_hf())
    assert hub.token_bytes[hub.eos_ids[0]] == b"<|im_end|>"
