"""KimiTokenizer: its rules on a small rank file, the released ids where that file is there."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import Tokenizer
from engine.chat.calls import ids_of_marked_text
from engine.chat.kimi_tokenizer import KimiTokenizer, read_ranks
from engine.chat.markers import SPECIAL_TOKENS, kimi_special_ids
from engine.errors import ChatError
from tests.engine.chat.dialogues import SMALL_RANKS, small_kimi, texts

KIMI = os.environ.get("PARL_KIMI_DIR", "")
TOKENIZER = small_kimi()


def test_is_a_tokenizer():
    """The class meets the protocol."""
    assert isinstance(TOKENIZER, Tokenizer)
    assert TOKENIZER.vocab_size == 1024 + 256


@given(texts)
def test_text_round_trip_without_special_ids(text):
    """Text that spells markers is text, and every text comes back exactly."""
    ids = TOKENIZER.encode(text)
    assert not any(TOKENIZER.is_special(token_id) for token_id in ids)
    assert TOKENIZER.decode(ids) == text


@given(st.binary())
def test_bytes_round_trip(data):
    """Bytes that are not UTF-8 survive decode and encode unchanged."""
    text = data.decode("utf-8", "surrogateescape")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_any_ids_decode(ids):
    """Whatever a policy samples has a text."""
    assert isinstance(TOKENIZER.decode(ids), str)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("read the task", ["read", " the", " task"]),
        ("你好,data", ["你好", ",", "data"]),
        ("2024", ["20", "2", "4"]),
        ("it's\n\n  x", ["it", "'s", "\n\n", " ", " ", "x"]),
    ],
)
def test_small_goldens(text, pieces):
    """Han runs, letters with their space, digits and blank lines are cut apart."""
    assert [TOKENIZER.decode([token_id]) for token_id in TOKENIZER.encode(text)] == pieces


def test_special_ids_of_the_released_vocabulary():
    """Where every name stands behind 163,584 merges (facts/kimi-facts.md 1.3)."""
    ids = kimi_special_ids(163584)
    expected = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|im_end|>": 163586,
        "<|im_user|>": 163587,
        "<|im_assistant|>": 163588,
        "<|reserved_token_163589|>": 163589,
        "<|start_header_id|>": 163590,
        "<|end_header_id|>": 163591,
        "[EOT]": 163593,
        "<|im_system|>": 163594,
        "<|tool_calls_section_begin|>": 163595,
        "<|tool_calls_section_end|>": 163596,
        "<|tool_call_begin|>": 163597,
        "<|tool_call_argument_begin|>": 163598,
        "<|tool_call_end|>": 163599,
        "<|im_middle|>": 163601,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<think>": 163606,
        "</think>": 163607,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert {name: ids[name] for name in expected} == expected
    assert set(SPECIAL_TOKENS) < set(ids)
    assert sorted(ids.values()) == list(range(163584, 163840))


def test_specials_follow_the_merges():
    """On a rank file of any size; reserved ids have names too."""
    first = TOKENIZER.special_id("[BOS]")
    assert (first, TOKENIZER.special_id("[PAD]")) == (1024, 1279)
    assert TOKENIZER.special_id("<|reserved_token_1029|>") == 1029
    assert TOKENIZER.decode([1029, 1041]) == "<|reserved_token_1029|><|im_middle|>"
    assert TOKENIZER.is_special(1029) and not TOKENIZER.is_special(1023)
    with pytest.raises(ChatError, match=r"<\|im_user\|>"):
        TOKENIZER.special_id("<|reserved_token_163589|>")


@pytest.mark.parametrize("num", [25_000, 25_001, 60_000, 400_001])
@pytest.mark.parametrize("character", ["a", " ", "字"])
def test_long_runs_are_cut(num, character):
    """After every 25,000 characters of one kind no token reaches over the cut."""
    text = "b c" + "\n" * 2 + character * num
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    ends, at = set(), 0
    for token_id in ids:
        at += len(TOKENIZER._pieces[token_id])
        ends.add(at)
    start = 3 if character == " " else 5
    cuts = range(start + 25_000, min(5 + num, 400_000), 25_000)
    assert all(len(text[:cut].encode()) in ends for cut in cuts)


def test_fingerprint():
    """The tokens and their order count."""
    ranks = read_ranks(SMALL_RANKS.read_bytes(), "small")
    assert KimiTokenizer(ranks).fingerprint == TOKENIZER.fingerprint
    last, other = (next(t for t, r in ranks.items() if r == rank) for rank in (1023, 1022))
    assert KimiTokenizer({**ranks, last: 1022, other: 1023}).fingerprint != TOKENIZER.fingerprint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"IQ== x\n", "expected TOKEN_IN_BASE64 RANK"),
        (b"IQ== 0\nIg== 2\n", "not 0 to 1"),
        (b"IQ== 0\nIg== 1\n", "lacks 254 of the 256"),
        (None, "cannot be read"),
    ],
)
def test_bad_rank_files(tmp_path, content, reason):
    """What is wrong with the file is said in one line."""
    path = tmp_path / "tiktoken.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ChatError, match=reason):
        KimiTokenizer.from_file(path)


released = pytest.mark.skipif(
    not KIMI, reason="PARL_KIMI_DIR is not set: a folder with Kimi's tiktoken.model"
)


@pytest.fixture(scope="module")
def kimi() -> KimiTokenizer:
    return KimiTokenizer.from_file(KIMI)


CALL = (
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Beijing"}<|tool_call_end|>'
)
CALL_IDS = [163597, 41937, 1150, 21055, 2800, 25, 15, 163598]
CALL_IDS += [8264, 37666, 1289, 414, 4396, 39556, 16934, 163599]


@released
def test_released_goldens(kimi):
    """Ids of the released tokenizer (facts/kimi-facts.md 1.3)."""
    assert kimi.vocab_size == 163840
    assert kimi.encode("Hello world") == [19180, 2695]
    assert kimi.encode("你好") == [33845]
    assert kimi.encode("12345678") == [6694, 12972, 4447]
    assert ids_of_marked_text(CALL, kimi) == CALL_IDS
    assert not any(map(kimi.is_special, kimi.encode(CALL)))


@released
def test_released_special_tokens(kimi):
    """Every named token of the released configuration, where that file is there too."""
    config = Path(KIMI) / "tokenizer_config.json"
    if not config.exists():
        pytest.skip(f"{config} is missing")
    named = json.loads(config.read_text())["added_tokens_decoder"]
    assert {token["content"]: int(i) for i, token in named.items()} == {
        name: i for name, i in kimi.special_tokens.items() if "reserved" not in name
    }


def test_cuts_are_the_released_ones():
    """The rule, written as the released loop: count the run, cut when it is too long."""
    from engine.chat.kimi_tokenizer import MAX_RUN_CHARS, _pieces_of

    text = "".join(
        c * n for c, n in [("a", 3), (" ", 25_000), ("\x1c", 1), ("b", 75_001), ("\n", 2)]
    )
    cuts, run = [0], 0
    kind = text[0].isspace()
    for index, character in enumerate(text):
        run = run + 1 if character.isspace() == kind else 1
        kind = character.isspace()
        if run > MAX_RUN_CHARS:
            cuts.append(index)
            run = 1
    expected = [text[a:b] for a, b in pairwise([*cuts, len(text)])]
    assert list(_pieces_of(text)) == expected
    assert len(expected) == 5
