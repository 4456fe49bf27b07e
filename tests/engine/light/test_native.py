"""The native step against torch: logits, tokens, weights that swap, refusals."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import NotSupportedError
from engine.kvcache.paged import PagedKV
from engine.light import native
from engine.light.engine import LightEngine
from engine.light.native import NativeModel
from engine.light.sampler import sample
from engine.model.config import ModelConfig
from engine.model.dense import forward_dense
from engine.model.model import PolicyModel
from engine.runtime.types import ContextPolicy, DrawKey, Sampling, StepRequest
from engine.runtime.weights import make_weight_set
from infra.errors import ConfigError
from tests.engine.tiny import MODEL, make_model

PLAIN = ModelConfig(
    vocab_size=83,
    hidden_size=48,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    intermediate_size=80,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
ODD = ModelConfig.model_validate(
    PLAIN.model_dump()
    | {
        "vocab_size": 101,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_interleave": True,
    }
)
"""Sizes that fill no panel, more queries of a key than share a reading, tied, interleaved."""
LENGTH, PROMPT = 70, 41
FAST = EngineConfig(
    deterministic=False, compute="fast", max_context=160, num_blocks=64, max_contexts=16
)

reason = native.why_not(PLAIN, FAST)
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native step: {reason}")


def reference(config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [3, T], logits fp32 [3, T, V] by torch in fp32, and by torch in bf16."""
    return _reference(config.model_dump_json())


@functools.cache
def _reference(fields: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    config = ModelConfig.model_validate_json(fields)
    ids = torch.randint(config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids, dtype=torch.bool)
    exact = make_model(config)
    coarse = PolicyModel(config, None).bfloat16()
    coarse.load_state_dict(exact.state_dict())
    with torch.inference_mode():
        logits = [
            model.logits(forward_dense(model, ids, mask)[0].flatten(0, 1)).unflatten(0, (3, -1))
            for model in (exact, coarse)
        ]
    return ids.numpy(), logits[0].numpy(), logits[1].numpy()


def tensors_of(model: PolicyModel) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def native_logits(config: ModelConfig, engine: EngineConfig) -> np.ndarray:
    """[3, T, V]: three prompts in one step, then a token of each a step."""
    ids, _, _ = reference(config)
    model = NativeModel(config, engine)
    model.load(tensors_of(make_model(config)))
    kv = paged(config, engine)
    tables = np.array([[4, 2, 9], [1, 5, 3], [8, 7, 6]])
    out = np.full((3, LENGTH, config.vocab_size), np.nan, np.float32)
    where = np.tile(np.arange(PROMPT), 3)
    prompts = ids[:, :PROMPT].reshape(-1)
    wanted = np.arange(3 * PROMPT)
    logits, bad = model.step(prompts, where, np.repeat(tables, PROMPT, 0), kv, wanted)
    assert not bad.any()
    out[:, :PROMPT] = logits.reshape(3, PROMPT, -1)
    for t in range(PROMPT, LENGTH):
        logits, bad = model.step(ids[:, t], np.full(3, t), tables, kv, np.arange(3))
        assert not bad.any()
        out[:, t] = logits
    return out


def paged(config: ModelConfig, engine: EngineConfig) -> PagedKV:
    dtype = getattr(torch, engine.kv_dtype)
    kv = PagedKV(
        config.num_hidden_layers,
        10,
        engine.block_size,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
    )
    # what no token wrote must not be read
    for store in kv.keys + kv.values:
        store.fill_(torch.nan)
    return kv


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("config", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("threads", [1, 3])
def test_float32_is_torch(config: ModelConfig, threads: int):
    """Prefill and decode, on one thread and on more than this machine may have."""
    engine = FAST.model_copy(update={"num_threads": threads})
    _, exact, _ = reference(config)
    assert np.abs(native_logits(config, engine) - exact).max() < 1e-4


@pytest.mark.parametrize("config", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_bfloat16_errs_no_more_than_torch_does(config: ModelConfig, kv_dtype: str):
    """At most twice the error of torch's own bf16 model; in fact less: sums stay in fp32."""
    engine = FAST.model_copy(update={"weights": "bfloat16", "kv_dtype": kv_dtype})
    _, exact, coarse = reference(config)
    given = native_logits(config, engine)
    assert rms(given - exact) < rms(coarse - exact)
    assert np.abs(given - exact).max() < 2 * np.abs(coarse - exact).max()


def rounded(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """What the codes of a matrix may stand for at worst: half a step of the largest."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group))
    groups = padded.unflatten(1, (-1, group))
    scale = groups.abs().amax(dim=2, keepdim=True) / (127 if bits == 8 else 7)
    codes = (groups / scale.clamp_min(1e-20)).round()
    return (codes * scale).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("config", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_codes_err_like_rounding(config: ModelConfig, group: int, weights: str, bits: int):
    """Against torch with weights rounded plainly: the same size of error, and no more."""
    engine = FAST.model_copy(update={"weights": weights, "weight_group": group})
    ids, exact, _ = reference(config)
    plain = make_model(config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.dim() == 2 and name != "embed_tokens":
                parameter.copy_(rounded(parameter, bits, group))
    head = None
    if config.tie_word_embeddings:  # the head is rounded, the input embedding is not
        head = rounded(plain.embed_tokens.detach(), bits, group)
    with torch.inference_mode():
        hidden, _ = forward_dense(plain, torch.from_numpy(ids), torch.ones(3, LENGTH) > 0)
        flat = hidden.flatten(0, 1)
        logits = plain.logits(flat) if head is None else flat @ head.t()
    error = rms(logits.unflatten(0, (3, -1)).numpy() - exact)
    given = native_logits(config, engine)
    assert rms(given - exact) < 1.2 * error
    assert np.corrcoef(given.ravel(), exact.ravel())[0, 1] > (0.999 if bits == 8 else 0.9)


def steps(config: ModelConfig, engine: EngineConfig, sampling: Sampling) -> list[list[int]]:
    """32 tokens after each of 9 prompts, all at once."""
    weights = make_weight_set(1, tensors_of(make_model(config)), config.model_dump(mode="json"))

    async def run(light: LightEngine) -> list[list[int]]:
        contexts = [
            await light.init_context(
                [(7 * i + j) % config.vocab_size for j in range(3 + 5 * i)],
                ContextPolicy(draw=DrawKey(3, sample=i)),
            )
            for i in range(9)
        ]
        results = await asyncio.gather(
            *(light.forward_step(StepRequest(ctx, 32, sampling)) for ctx in contexts)
        )
        return [result.token_ids.tolist() for result in results]

    light = LightEngine(config, engine, fetch_weights=lambda version: weights)
    try:
        return asyncio.run(run(light))
    finally:
        light.close()


@pytest.mark.parametrize("config", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_says_the_same_tokens(config: ModelConfig, temperature: float):
    """In float32, batched, through MRI: greedy and drawn tokens are torch's."""
    sampling = Sampling(temperature=temperature)
    plain = FAST.model_copy(update={"compute": "exact"})
    expected, given = steps(config, plain, sampling), steps(config, FAST, sampling)
    # a tie closer than rounding may turn one context; it would show in its tail only
    assert sum(a == b for a, b in zip(expected, given, strict=True)) >= 8
    assert all(a[:4] == b[:4] for a, b in zip(expected, given, strict=True))


def test_weights_swap_in_place():
    """After a second load nothing of the first is left."""
    model = NativeModel(PLAIN, FAST)
    ids, where, table = np.array([5, 6, 7]), np.arange(3), np.ones((3, 1), np.int64)
    answers = []
    for seed in (0, 1, 0):
        model.load(tensors_of(make_model(PLAIN, seed)))
        logits, _ = model.step(ids, where, table, paged(PLAIN, FAST), np.array([2]))
        answers.append(logits.copy())
    assert np.array_equal(answers[0], answers[2])
    assert not np.allclose(answers[0], answers[1], atol=1e-2)


def test_rows_that_diverge_are_named():
    """An embedding of infinity spoils the rows that read it, and no others."""
    tensors = tensors_of(make_model(PLAIN))
    tensors["embed_tokens"] = tensors["embed_tokens"].copy()
    tensors["embed_tokens"][9] = np.inf
    model = NativeModel(PLAIN, FAST)
    model.load(tensors)
    tables = np.array([[1], [2], [3]])
    _, bad = model.step(
        np.array([5, 9, 6]), np.zeros(3, int), tables, paged(PLAIN, FAST), np.array([0, 2])
    )
    assert bad.tolist() == [False, True, False]


def test_draw_is_the_samplers():
    """Tokens equal but where a draw falls within rounding of a border; logprobs to 1e-5."""
    generator = np.random.default_rng(0)
    logits = 3 * generator.standard_normal((400, 1003)).astype(np.float32)
    uniforms = generator.random(400)
    temperatures = np.where(np.arange(400) % 4 == 0, 0.0, 0.2 + generator.random(400))
    ids, logprobs = NativeModel(PLAIN.model_copy(update={"vocab_size": 1003}), FAST).draw(
        logits, uniforms, temperatures
    )
    expected, known = sample(logits, uniforms, [Sampling(temperature=t) for t in temperatures])
    same = ids == expected
    assert same.mean() > 0.99
    assert np.abs(logprobs - known)[same].max() < 1e-5


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch):
    """fast refuses with the reason, auto steps back to torch in float32."""
    asked = FAST.model_copy(update={"weights": "int4"})
    with pytest.raises(NotSupportedError, match="no experts"):
        LightEngine(MODEL, asked)
    settled = native.settle(MODEL, asked.model_copy(update={"compute": "auto"}))
    assert (settled.compute, settled.weights) == ("exact", "float32")
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(NotSupportedError, match="this processor lacks avx512_bf16"):
        LightEngine(PLAIN, FAST)
    assert native.settle(PLAIN, FAST.model_copy(update={"compute": "auto"})).compute == "exact"


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PARL_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    with pytest.raises(NotSupportedError, match="no-such-compiler"):
        LightEngine(PLAIN, FAST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": "fast", "deterministic": True}, "does not keep row bits"),
        ({"compute": "exact", "weights": "int8"}, "computes in float32"),
        ({"compute": "exact", "kv_dtype": "bfloat16"}, "computes in float32"),
    ],
)
def test_settings_that_contradict(changes: dict[str, object], message: str):
    with pytest.raises((ConfigError, ValueError), match=message):
        EngineConfig.model_validate({"deterministic": False} | changes)
