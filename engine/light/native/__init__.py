"""The native step: a dense decoder in one C++ call, weights packed for AVX-512 with BF16.

It knows models of the Llama family (grouped-query attention over all tokens, dense FFN), counts a
weight's bytes once a step for up to 12 rows, and answers with the torch model's logits but for
rounding. ``why_not`` says what keeps a model or a machine from it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import structlog
import torch

from engine.attention.native.build import BuildError, compile_once, cpu_flags
from engine.config import EngineConfig
from engine.errors import CapacityError, NotSupportedError
from engine.kvcache.paged import PagedKV
from engine.model.config import ModelConfig
from engine.model.rope import RotaryTable

log = structlog.get_logger(__name__)

SOURCES = (
    *("step.cpp", "team.inc", "pack.inc", "product.inc", "rows.inc", "draw.inc", "model.inc"),
    "walk.inc",
)
_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vbmi")
_OPTIONS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-w"),
    *(f"-m{flag}" for flag in (*_FLAGS, "avx2", "fma", "f16c", "bmi2")),
)
_CPU = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi", "bmi2", "f16c"}
)
FORMATS = ("float32", "bfloat16", "int8", "int4")
PARTS: tuple[str, ...] = ("qkv", "attention", "o_proj", "gate_up", "down", "lm_head", "rest")
_MOST_DIM = 256


class _Shape(ctypes.Structure):
    """``Shape`` of step.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("layers", "hidden", "heads", "groups", "dim", "width", "vocab"),
                *("format", "group", "threads", "max_rows", "interleaved"),
            )
        ),
        ("eps", ctypes.c_double),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    """``Step`` of step.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "sampled", "width")),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "tables", "wanted")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("block_size", "cache_is_bf16")),
        *((name, ctypes.c_void_p) for name in ("logits", "bad", "seconds")),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled at first use. BuildError."""
    path = compile_once(Path(__file__).parent, SOURCES, _OPTIONS, "step-avx512bf16")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    lib.parl_shape_bytes.restype = lib.parl_step_bytes.restype = ctypes.c_int64
    lib.parl_model_new.restype = ctypes.c_void_p
    lib.parl_model_bytes.restype = ctypes.c_int64
    lib.parl_model_read.restype = ctypes.c_double
    assert lib.parl_shape_bytes() == ctypes.sizeof(_Shape), "Shape differs from step.cpp"
    assert lib.parl_step_bytes() == ctypes.sizeof(_Step), "Step differs from step.cpp"
    return lib


def why_not(model: ModelConfig, config: EngineConfig) -> str | None:
    """What keeps this model, or this machine, from the native step; None when nothing does."""
    if model.num_moe_layers:
        return "it has no experts (model.first_k_dense_replace)"
    if model.is_mla or model.attention.mode != "full":
        return "it has grouped-query attention over all tokens only (model.attention)"
    if model.head_dim % 16 or model.head_dim > _MOST_DIM:
        return f"head_dim={model.head_dim}, expected a multiple of 16 up to {_MOST_DIM}"
    if config.block_size % 32:
        return f"engine.block_size={config.block_size}, expected a multiple of 32"
    missing = sorted(_CPU - cpu_flags())
    if missing:
        return f"this processor lacks {', '.join(missing)}"
    try:
        load()
    except BuildError as error:
        return str(error)
    return None


def settle(model: ModelConfig, config: EngineConfig) -> EngineConfig:
    """``config`` with ``compute`` "exact" or "fast" for "auto"; a step back is one log line.
    NotSupportedError when "fast" was asked for by name and cannot be had."""
    if config.compute == "exact":
        return config
    reason = why_not(model, config)
    if reason is None:
        return config.model_copy(update={"compute": "fast"})
    if config.compute == "fast":
        raise NotSupportedError(
            f"engine.compute='fast' is not possible here: {reason}; set it to 'auto' or 'exact'"
        )
    log.warning("no native step, torch computes in float32", reason=reason)
    plain = {"compute": "exact", "weights": "float32", "kv_dtype": "float32"}
    return config.model_copy(update=plain)


class NativeModel:
    """Packed weights, their threads, and the step. Called by one thread at a time."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        """CapacityError when there is no memory for the weights. Without
        ``config.num_threads`` as many threads as torch has: one in a Ray worker, all cores else."""
        self._config = model
        self._lib = load()
        self._max_rows = config.max_rows
        rotary = RotaryTable(model)
        # the library reads these as long as it lives
        self._kept: list[np.ndarray] = [rotary.cos.numpy(), rotary.sin.numpy()]
        self.num_threads = config.num_threads or torch.get_num_threads()
        shape = _Shape(
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            groups=model.num_key_value_heads,
            dim=model.head_dim,
            width=model.intermediate_size,
            vocab=model.vocab_size,
            format=FORMATS.index(config.weights),
            group=config.weight_group,
            threads=self.num_threads,
            max_rows=config.max_rows,
            interleaved=model.rope_interleave,
            eps=model.rms_norm_eps,
            cos=_address(self._kept[0]),
            sin=_address(self._kept[1]),
        )
        handle = self._lib.parl_model_new(ctypes.byref(shape))
        if not handle:
            raise CapacityError(
                f"no memory for {config.weights} weights of {model.num_hidden_layers} layers; free "
                "some or choose smaller engine.weights"
            )
        self._handle = ctypes.c_void_p(handle)
        self.weight_bytes = int(self._lib.parl_model_bytes(self._handle))
        self._seconds = np.zeros(len(PARTS))
        self._logits = np.empty((0, model.vocab_size), np.float32)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            self._lib.parl_model_free(handle)

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Pack the tensors of a PolicyModel's state_dict, fp32, over what was there."""
        for index in range(self._config.num_hidden_layers):
            names = [f"self_attn.{x}_proj" for x in "qkvo"]
            names += ["mlp.gate_up_proj", "mlp.down_proj"]
            names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
            parts = [np.ascontiguousarray(tensors[f"layers.{index}.{name}"]) for name in names]
            self._lib.parl_model_layer(self._handle, ctypes.c_int64(index), *map(_pointer, parts))
        table = np.array(tensors["embed_tokens"])  # ours: the caller's may change
        head = table
        if not self._config.tie_word_embeddings:
            head = np.ascontiguousarray(tensors["lm_head"])
        norm = np.ascontiguousarray(tensors["norm.weight"])
        self._lib.parl_model_ends(self._handle, _pointer(table), _pointer(head), _pointer(norm))
        self._kept[2:] = [table]

    def step(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        tables: np.ndarray,
        kv: PagedKV,
        wanted: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """token_ids, positions int64 [N], tables int64 [N, J], wanted rows int64 [M] -> (logits
        fp32 [M, V], valid until the next step; bad rows bool [N])."""
        count = len(wanted)
        assert max(len(token_ids), count) <= self._max_rows, "more rows than engine.max_rows"
        if len(self._logits) < count:
            # fresh pages every step would cost more than a sampler
            self._logits = np.empty((count, self._config.vocab_size), np.float32)
        bad = np.zeros(len(token_ids), bool)
        arrays = [np.ascontiguousarray(x, np.int64) for x in (token_ids, positions, tables, wanted)]
        stores = [
            np.array([x.data_ptr() for x in part], np.uint64) for part in (kv.keys, kv.values)
        ]
        step = _Step(rows=len(token_ids), sampled=count, width=tables.shape[1])
        step.ids, step.positions, step.tables, step.wanted = map(_address, arrays)
        step.keys, step.values = map(_address, stores)
        step.block_size, step.cache_is_bf16 = kv.block_size, kv.keys[0].dtype == torch.bfloat16
        step.logits, step.bad = _address(self._logits), _address(bad)
        step.seconds = _address(self._seconds)
        self._lib.parl_model_step(self._handle, ctypes.byref(step))
        return self._logits[:count], bad

    def draw(
        self, logits: np.ndarray, uniforms: np.ndarray, temperatures: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """engine.light.sampler.sample without truncation: logits fp32 [M, V], uniforms and
        temperatures fp64 [M] -> (ids int32 [M], logprobs fp32 [M])."""
        count = len(logits)
        ids, logprobs = np.empty(count, np.int32), np.empty(count, np.float32)
        logits = np.ascontiguousarray(logits)
        given = [np.ascontiguousarray(x, np.float64) for x in (uniforms, temperatures)]
        places = [ctypes.c_void_p(_address(x)) for x in (logits, *given, ids, logprobs)]
        self._lib.parl_draw(self._handle, ctypes.c_int64(count), *places)
        return ids, logprobs

    def take_seconds(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken = dict(zip(PARTS, self._seconds.tolist(), strict=True))
        self._seconds[:] = 0
        return taken

    def read_bandwidth(self) -> float:
        """GB/s at which these threads read these weights once and do nothing else."""
        return float(self._lib.parl_model_read(self._handle))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.dtype == np.float32, f"{array.dtype} weights, expected float32"
    return ctypes.c_void_p(_address(array))


def _address(array: np.ndarray) -> int:
    return array.ctypes.data
