"""Training of summaries on a tiny model: what a step reads, and the command's file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.summary_adapters import AnchorAdapters, MeanAdapters
from engine.attention.summary_files import load_adapters, model_hash
from engine.bench.kv_reading import Variant, read
from engine.bench.summary_training import (
    Document,
    TrainingPlan,
    fit,
    read_documents,
    student,
    summarise_of,
    train_summaries,
)
from engine.chat.tokenizers import ByteTokenizer
from engine.errors import EngineError
from engine.kvcache.router.encoder import HashingEncoder
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.summaries import geometry_of
from tests.engine.attention.cases import small_config
from tests.engine.tiny import MLA, MODEL, make_model

PLAN = TrainingPlan(
    documents=3, length=448, window=32, warm=64, topk=64, reads=8, steps=4, num_queries=24
)


def tiny(base: ModelConfig) -> PolicyModel:
    wide = {"max_position_embeddings": 512, "vocab_size": 320}
    return make_model(ModelConfig.model_validate(base.model_dump() | wide))


def documents(model: PolicyModel) -> list[Document]:
    ids = torch.randint(0, 256, (1400,), generator=torch.Generator().manual_seed(0)).tolist()
    return list(read_documents(model, ByteTokenizer(), ids, PLAN, HashingEncoder(32)))


@pytest.mark.parametrize("base", [MODEL, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("kind", ["none", "means", "anchor"])
def test_a_training_step_reads_what_hybrid_attention_reads(base: ModelConfig, kind: str):
    """The same tiers, counts and summaries as attend_sequence, but for the codes' rounding."""
    model = tiny(base)
    read_before = documents(model)
    document, geometry = read_before[-1], geometry_of(model.config)
    adapters = {
        "none": None,
        "means": MeanAdapters(geometry),
        "anchor": AnchorAdapters(geometry, "hashing-32", 32, 16),
    }[kind]
    summarise = None
    if adapters is not None:
        fit(adapters, read_before, PLAN)
        summarise = summarise_of(adapters, document.vectors)
    start = 352
    weight = 0.0 if adapters is None else 1.0
    config = small_config(window=32, topk=96, candidates=96, dense_below=0)
    config = config.model_copy(update={"summary_weight": weight})
    ids = document.stored.token_ids
    stored = document.stored
    before = type(stored)(
        ids[:start],
        tuple(k[:start] for k in stored.keys),
        tuple(None if v is None else v[:start] for v in stored.values),
    )
    variant = Variant("test", "k8v8", config, 32, 64)
    with torch.no_grad():
        want = read(model, before, ids[start : start + 8], variant, summarise=summarise)
        got = student(model, document, start, PLAN, summarise)
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


def test_too_little_text_is_one_clear_line():
    with pytest.raises(EngineError, match="the text has 700 tokens, 3 documents of 448 need 1344"):
        list(read_documents(tiny(MODEL), ByteTokenizer(), [1] * 700, PLAN))
    with pytest.raises(EngineError, match="at least 2 documents"):
        TrainingPlan(length=300).check()


@pytest.mark.slow
def test_the_command_saves_what_fits_the_model(tmp_path: Path):
    model, out = tiny(MODEL), tmp_path / "adapters.safetensors"
    text = "".join(chr(97 + (i * i) % 23) for i in range(1500))
    lines = list(train_summaries(model, ByteTokenizer(), text, PLAN, out))
    assert lines[-2].startswith(f"saved {out}") and "summary_weight" in lines[-1]
    geometry = geometry_of(model.config)
    found = load_adapters(out, geometry, trained_with=model_hash(model.state_dict()))
    assert isinstance(found, MeanAdapters) and bool(found.to_value.any())
