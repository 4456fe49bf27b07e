"""The compiled decode step: scan, selection, exact scores and attention in one call.

It knows ``index = "codes"`` by tokens with ``share = "max"``, and dense contexts; on CPU tensors,
head sizes that are multiples of 16, all profiles. Its choice is the torch reference's (see codes.py
and index.exact_scores), its output differs by rounding. A missing compiler is one log line.
"""

from __future__ import annotations

import ctypes
import functools

import structlog
import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.native.build import BuildError, best_instructions, library
from engine.attention.topology import SINK, is_dense, window_start
from engine.attention.view import LayerView, WarmBlocks

log = structlog.get_logger(__name__)

Decoded = tuple[Tensor, Tensor, Tensor | None]
"""out fp32 [A, V], lse fp32 [A], selected int32 [G, P | 1, K] or None when dense."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


_POINTERS = (
    ["top", "mid", "low", "minimum", "scale", "value_codes", "value_scale", "value_minimum"],
    ["slots", "blocks"],
    ["out", "lse", "selected"],
)


class _Call(ctypes.Structure):
    """``Call`` of attend.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("groups", "heads", "dim", "value_dim")),
        ("q", ctypes.c_void_p),
        *((name, _Rows) for name in ("sink_k", "sink_v", "hot_k", "hot_v")),
        *((name, ctypes.c_void_p) for name in _POINTERS[0]),
        ("value_bits", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS[1]),
        ("num_warm", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("hot_start", "window_start")),
        *((name, ctypes.c_int64) for name in ("dense", "shared", "candidates", "topk")),
        *((name, ctypes.c_void_p) for name in _POINTERS[2]),
    )


@functools.cache
def load(instructions: str | None = None) -> ctypes.CDLL:
    """The library for an instruction set, this machine's best by default. BuildError."""
    path = library(instructions or best_instructions())
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    lib.parl_call_bytes.restype = ctypes.c_int64
    lib.parl_decode.restype = lib.parl_scan.restype = lib.parl_decode_rows.restype = None
    assert lib.parl_call_bytes() == ctypes.sizeof(_Call), "Call differs between C++ and Python"
    return lib


@functools.cache
def unavailable() -> str | None:
    """Why there is no library here, None when there is one; logged once."""
    try:
        load()
    except BuildError as error:
        log.warning("no native attention, torch is used", reason=str(error))
        return str(error)
    return None


def why_not(view: LayerView, config: HybridConfig) -> str | None:
    """What keeps this step from the native path, None when nothing does."""
    dense = is_dense(view.length, config.dense_below)
    if not dense:
        if config.index not in ("codes", "none"):
            return f"it has no index '{config.index}'"
        if config.topk_unit != "token" or config.share != "max" or config.summary_weight > 0:
            return "it retrieves tokens by the largest score and has no summaries"
    if view.sink_k.shape[-1] % 16:
        return f"head size {view.sink_k.shape[-1]} is not a multiple of 16"
    tensors = [view.sink_k, view.sink_v, view.hot_k, view.hot_v]
    if any(x.dtype not in (torch.float32, torch.bfloat16) or x.is_cuda for x in tensors):
        return "it reads fp32 and bf16 in main memory"
    if any(x.numel() and x.stride(-1) != 1 for x in tensors):
        return "the last dimension of hot keys or values is not dense"
    if view.warm is not None and not all(x.is_contiguous() for x in _pools(view.warm)):
        return "the pools of warm blocks are not dense"
    return unavailable()


def decode(scaled: Tensor, view: LayerView, config: HybridConfig) -> Decoded | None:
    """scaled fp32 [A, D]; None when this step is not for it (``why_not`` says why)."""
    return None if why_not(view, config) else decode_with(load(), scaled, view, config)


def decode_with(lib: ctypes.CDLL, scaled: Tensor, view: LayerView, config: HybridConfig) -> Decoded:
    """With a given library; the caller made sure that it knows the case."""
    groups, value_dim = view.sink_k.shape[0], view.sink_v.shape[-1]
    heads = len(scaled) // groups
    dense = is_dense(view.length, config.dense_below)
    topk = 0 if config.index == "none" else config.topk
    out, lse = torch.empty(len(scaled), value_dim), torch.empty(len(scaled))
    choices = 1 if config.topk_shared else heads
    selected = torch.full((groups, choices, config.topk), -1, dtype=torch.int32)
    scaled = scaled.contiguous()
    call = _call(scaled, view)
    # a context within the sink has no hot rows, so none before the window either
    call.window_start = min(window_start(view.length, config.window), view.length)
    call.dense, call.shared = dense, config.topk_shared
    call.candidates, call.topk = config.candidates, topk
    call.out, call.lse, call.selected = out.data_ptr(), lse.data_ptr(), selected.data_ptr()
    lib.parl_decode(ctypes.byref(call))
    return out, lse, None if dense else selected


class Rows:
    """Decode steps of many rows, collected and then done in one call on several threads. A row's
    bits are those of ``decode_with``, whatever else is collected.

    scaled fp32 [N, A, D]; out fp32 [N, A, V] and selected int32 [N, G, P | 1, K], filled with -1,
    are written; the last three dimensions of each are dense."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        config: HybridConfig,
        scaled: Tensor,
        out: Tensor,
        selected: Tensor,
    ) -> None:
        assert scaled.dtype == out.dtype == torch.float32, f"{scaled.dtype} to {out.dtype}"
        self._lib, self._config = lib, config
        self._scaled, self._out, self._selected = scaled.contiguous(), out, selected
        self._lse = torch.empty(scaled.shape[:2])
        self._calls: list[_Call] = []
        self._views: list[LayerView] = []
        """What the calls point into."""

    def add(self, view: LayerView, first: int, count: int) -> None:
        """Rows first .. first + count - 1, the last of context length ``view.length`` and each
        before it one shorter, all with the warm blocks of ``view`` and all dense or all sparse."""
        config = self._config
        base = _call(self._scaled[first], view)
        base.dense = is_dense(view.length, config.dense_below)
        base.shared, base.candidates = config.topk_shared, config.candidates
        base.topk = 0 if config.index == "none" else config.topk
        for row, length in enumerate(range(view.length - count + 1, view.length + 1), first):
            call = _Call.from_buffer_copy(base)
            sink = min(SINK, length)
            hot = max(0, length - view.hot_start)
            call.sink_k.count = call.sink_v.count = sink
            call.hot_k.count = call.hot_v.count = hot
            call.hot_start = length - hot
            call.window_start = min(window_start(length, config.window), length)
            call.q = self._scaled.data_ptr() + 4 * row * self._scaled.stride(0)
            call.out = self._out.data_ptr() + 4 * row * self._out.stride(0)
            call.lse = self._lse.data_ptr() + 4 * row * self._lse.stride(0)
            call.selected = self._selected.data_ptr() + 4 * row * self._selected.stride(0)
            self._calls.append(call)
        self._views.append(view)

    def run(self, num_threads: int) -> None:
        """What was added, and forget it."""
        calls = (_Call * len(self._calls))(*self._calls)
        self._lib.parl_decode_rows(
            calls, ctypes.c_int64(len(calls)), ctypes.c_int64(max(1, num_threads))
        )
        self._calls.clear()
        self._views.clear()


def scan_with(lib: ctypes.CDLL, scaled: Tensor, view: LayerView) -> Tensor:
    """codes.scan_codes of one query row: fp32 [G, P, 32 W]."""
    assert view.warm is not None, "a scan needs warm blocks"
    groups = view.sink_k.shape[0]
    scaled = scaled.contiguous()
    scores = torch.empty(groups, len(scaled) // groups, 32 * len(view.warm))
    call = _call(scaled, view)
    lib.parl_scan(ctypes.byref(call), ctypes.c_void_p(scores.data_ptr()))
    return scores


def _call(scaled: Tensor, view: LayerView) -> _Call:
    groups, _, dim = view.sink_k.shape
    call = _Call(groups=groups, heads=len(scaled) // groups, dim=dim)
    call.value_dim = view.sink_v.shape[-1]
    call.q, call.hot_start = scaled.data_ptr(), view.hot_start
    call.sink_k, call.sink_v = _rows(view.sink_k), _rows(view.sink_v)
    call.hot_k, call.hot_v = _rows(view.hot_k), _rows(view.hot_v)
    warm = view.warm
    if warm is None or not len(warm):
        return call
    keys, values = warm.keys, warm.values
    for name in ("top", "mid", "low", "minimum", "scale"):
        setattr(call, name, getattr(keys, name).data_ptr())
    if values is not None:
        call.value_bits = 8 if values.minimum is None else 4
        call.value_codes, call.value_scale = values.codes.data_ptr(), values.scale.data_ptr()
        call.value_minimum = None if values.minimum is None else values.minimum.data_ptr()
    call.slots, call.blocks = warm.slots.data_ptr(), warm.blocks.data_ptr()
    call.num_warm = len(warm)
    return call


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), x.stride(0), x.stride(1), x.shape[1], x.dtype == torch.bfloat16)


def _pools(warm: WarmBlocks) -> list[Tensor]:
    keys, values = warm.keys, warm.values
    pools = [keys.top, keys.mid, keys.low, keys.minimum, keys.scale, warm.slots, warm.blocks]
    if values is not None:
        pools += [values.codes, values.scale]
        pools += [] if values.minimum is None else [values.minimum]
    return pools
