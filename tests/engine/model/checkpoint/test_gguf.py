"""GGUF files that we write: a small Llama, and headers that say what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError
from engine.model.checkpoint.load import load_model

WIDTH, HEADS, INNER, WORDS = 16, 4, 24, 10
SHAPES = {
    "token_embd": (WORDS, WIDTH),
    "output_norm": (WIDTH,),
    "blk.0.attn_norm": (WIDTH,),
    "blk.0.ffn_norm": (WIDTH,),
    "blk.0.attn_q": (WIDTH, WIDTH),
    "blk.0.attn_k": (WIDTH, WIDTH),
    "blk.0.attn_v": (WIDTH, WIDTH),
    "blk.0.attn_output": (WIDTH, WIDTH),
    "blk.0.ffn_gate": (INNER, WIDTH),
    "blk.0.ffn_up": (INNER, WIDTH),
    "blk.0.ffn_down": (WIDTH, INNER),
}
FIELDS: dict[str, Any] = {
    "llama.attention.head_count": HEADS,
    "llama.embedding_length": WIDTH,
    "llama.block_count": 1,
    "llama.feed_forward_length": INNER,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
    "tokenizer.ggml.model": "llama",
}


def write_gguf(path: Path, **changes: Any) -> Path:
    """A tied Llama of one layer with random tensors; ``changes`` by the last part of a name."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    names = {name.rpartition(".")[2]: name for name in FIELDS}
    names["dimension_count"] = "llama.rope.dimension_count"
    names["eos_token_id"] = "tokenizer.ggml.eos_token_id"
    fields = FIELDS | {names[short]: value for short, value in changes.items()}
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint64(name, value)
    generator = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_small_llama(tmp_path: Path):
    """The shape from the header and from the embedding."""
    config = load_model(write_gguf(tmp_path / "m.gguf")).config
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (WORDS, WIDTH, 4)
    assert config.tie_word_embeddings and config.num_moe_layers == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_count": 0}, "llama.attention.head_count=0: expected a count"),
        ({"head_count": "four"}, "llama.attention.head_count='four': expected a number"),
        ({"head_count": [4, 4]}, r"head_count=\[4, 4\]: expected a number"),
        ({"dimension_count": 3}, "m.gguf: head_dim=3: Input should be a multiple of 2"),
        ({"block_count": 3_000_000}, "num_hidden_layers=3000000: expected at most"),
        ({"block_count": 900}, "num_hidden_layers=900, .* they have 1 layers"),
        ({"context_length": 10**12}, "max_position_embeddings=1000000000000: expected at most"),
        ({"layer_norm_rms_epsilon": float("inf")}, "rms_norm_eps=inf: expected a finite"),
        ({"eos_token_id": 10}, "eos_token_id=10 is outside the vocabulary of 10"),
    ],
)
def test_headers_that_cannot_be(changes: dict[str, Any], words: str, tmp_path: Path):
    """The file, the field, its value and what was expected."""
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=words):
        load_model(path)
