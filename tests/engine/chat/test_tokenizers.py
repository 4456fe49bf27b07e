"""ByteTokenizer: lossless, injection-safe, words as single tokens."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import Tokenizer
from engine.chat.markers import SPECIAL_TOKENS
from engine.chat.tokenizers import ByteTokenizer
from engine.errors import ChatError

WORDS = ("functions.lookup", "functions.", '{"key":"', '"}', "城市", "aa", "aaa")
TOKENIZER = ByteTokenizer(WORDS)

real_text = st.text(st.characters(exclude_categories=("Cs",)))
spiked_text = st.lists(
    st.one_of(real_text, st.sampled_from(WORDS), st.sampled_from(SPECIAL_TOKENS))
).map("".join)


def test_is_a_tokenizer():
    """The class meets the protocol that HF and Kimi tokenizers will meet."""
    assert isinstance(TOKENIZER, Tokenizer)


def test_layout_of_ids():
    """Bytes first, then the markers, then the words in the given order."""
    assert TOKENIZER.encode("A\n") == [65, 10]
    assert TOKENIZER.special_id("[BOS]") == 256
    first_word = 256 + len(SPECIAL_TOKENS)
    assert TOKENIZER.encode("functions.lookup") == [first_word]
    assert TOKENIZER.vocab_size == first_word + len(WORDS)


@given(spiked_text)
def test_text_round_trip_without_special_ids(text):
    """Text that spells markers is bytes, and every text comes back exactly."""
    ids = TOKENIZER.encode(text)
    assert not any(TOKENIZER.is_special(token_id) for token_id in ids)
    assert TOKENIZER.decode(ids) == text


@given(st.binary())
def test_bytes_round_trip(data):
    """Bytes that are not UTF-8 survive decode and encode unchanged."""
    text = ByteTokenizer().decode(list(data))
    assert bytes(ByteTokenizer().encode(text)) == data


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_any_ids_decode(ids):
    """Whatever a policy samples has a text, with specials as their names."""
    text = TOKENIZER.decode(ids)
    for name in {SPECIAL_TOKENS[i - 256] for i in ids if TOKENIZER.is_special(i)}:
        assert name in text


def test_longest_word_wins():
    """At one position the longest word is taken; the rest is matched from there."""
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("aaaaa")] == ["aaa", "aa"]
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("functions.lo")] == [
        "functions.",
        "l",
        "o",
    ]


def test_other_surrogates_become_the_replacement_character():
    """A surrogate that escapes no byte is no text; it must not crash a rollout."""
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("a",), "shorter than two bytes"),
        (("",), "shorter than two bytes"),
        (("ab", "ab"), "given twice"),
        (("x<|im_end|>",), "spells a marker"),
        (("<|tool_call_section_begin|>",), "spells a marker"),
        (("ab\ud800",), "not valid text"),
    ],
)
def test_bad_words(words, reason):
    """A vocabulary with ambiguous or useless words is refused in one line."""
    with pytest.raises(ChatError, match=reason):
        ByteTokenizer(words)


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.vocab_size])
def test_foreign_id(token_id):
    """An id of another vocabulary is named, not wrapped around."""
    with pytest.raises(ChatError, match=str(token_id)):
        TOKENIZER.decode([token_id])


def test_unknown_special():
    """Asking for a marker that does not exist lists those that do."""
    with pytest.raises(ChatError, match=r"<\|im_user\|>"):
        TOKENIZER.special_id("<|tool_call_section_begin|>")


def test_fingerprint():
    """Equal vocabularies agree across processes; order and content of words count."""
    assert TOKENIZER.fingerprint == ByteTokenizer(list(WORDS)).fingerprint
    assert len(TOKENIZER.fingerprint) == len(hashlib.sha256().hexdigest())
    assert ByteTokenizer(("ab", "cd")).fingerprint != ByteTokenizer(("cd", "ab")).fingerprint
    code = "import engine.chat.tokenizers as t; print(t.ByteTokenizer(('ab',)).fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == ByteTokenizer(("ab",)).fingerprint
