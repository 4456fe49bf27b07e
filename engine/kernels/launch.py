"""How kernels are started: the GPU settings of every kernel, its launch counter, and compiling for
a GPU that is not there.

The settings are starting points from sizes (registers, shared memory, see ``parl bench kernels
--compile``), not from timing: no GPU was available. ``parl bench kernels --device cuda --sweep``
times their neighbours.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Setting:
    num_warps: int = 4
    num_stages: int = 2
    sizes: dict[str, int] = field(default_factory=dict)
    """Tile sizes, passed to the kernel as constants under these names."""


SETTINGS: dict[str, Setting] = {
    # a copy; one program a row
    "kv_append": Setting(num_warps=2),
    # one block of one head: [128 channels, 32 tokens] in registers
    "kv_quantise_keys": Setting(num_warps=4),
    "kv_quantise_values": Setting(num_warps=4),
    "kv_dequant": Setting(num_warps=4),
    # memory-bound: 4 blocks a program amortise the query's load, many programs hide latency
    "code_scan": Setting(num_warps=4, num_stages=3, sizes={"BLOCKS": 4}),
    # int64 keys of a tile live in registers while they are sorted: 1024 over 128 threads
    "topk_select": Setting(num_warps=4, num_stages=1, sizes={"TILE": 1024}),
    # split-K: a program owns at least this many blocks of 32
    "decode_attn_tiered": Setting(num_warps=4, num_stages=2),
    # accumulator [16, 512] fp32 is 64 registers a thread with 4 warps, 32 with 8
    "decode_attn_latent": Setting(num_warps=8, num_stages=1),
    "gathered_attn": Setting(num_warps=4, num_stages=2),
    "gathered_attn_latent": Setting(num_warps=8, num_stages=1),
    "gathered_scores": Setting(num_warps=4, num_stages=2),
    "summary_attn": Setting(num_warps=4, num_stages=2),
    "lse_merge": Setting(num_warps=2),
    # FlashAttention's shape for D = 128, halved in queries because two value tiles are held
    "prefill_hybrid": Setting(num_warps=4, num_stages=2, sizes={"BLOCK_M": 32}),
    "moe_route": Setting(num_warps=4, num_stages=1),
    "moe_up": Setting(8, 3, {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64}),
    "moe_down": Setting(8, 3, {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64}),
    "moe_combine": Setting(num_warps=4),
}
"""By kernel. BLOCK_M of moe_up and moe_down must be equal: rows are laid out once."""

MIN_BLOCKS_PER_SPLIT = 4
MAX_SPLITS = 64
"""Split-K of decoding: 64 splits of 8 heads are 512 programs for 132 multiprocessors."""

launches: Counter[str] = Counter()
"""Launches by kernel since the process started; read through ``counted`` in tests."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel takes on ``target``."""

    kernel: str
    shared_bytes: int
    binary: bytes


@dataclass(slots=True)
class _Target:
    backend: Any
    results: list[Compiled] = field(default_factory=list)


_target: ContextVar[_Target | None] = ContextVar("target", default=None)


def interpreting() -> bool:
    """Kernels of this process run in Triton's interpreter."""
    return bool(knobs.runtime.interpret)


def compiling() -> bool:
    return _target.get() is not None


@contextmanager
def compile_only(capability: int) -> Iterator[list[Compiled]]:
    """Launches in this block compile for CUDA ``capability`` (80, 90 ...) and do not run: outputs
    stay as allocated. Needs no GPU; tensors may lie on the CPU."""
    from triton.backends.compiler import GPUTarget

    assert not interpreting(), "the interpreter compiles nothing; unset TRITON_INTERPRET"
    target = _Target(GPUTarget("cuda", capability, 32))
    token = _target.set(target)
    try:
        yield target.results
    finally:
        _target.reset(token)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The launches of this block by kernel; filled in when it ends. Counts all threads."""
    with _lock:
        before = Counter(launches)
    delta: Counter[str] = Counter()
    try:
        yield delta
    finally:
        with _lock:
            delta.update({k: n - before[k] for k, n in launches.items() if n > before[k]})


@contextmanager
def override(kernel: str, setting: Setting) -> Iterator[None]:
    """Another setting for ``kernel`` in this block, in all threads; for sweeps."""
    before = SETTINGS[kernel]
    SETTINGS[kernel] = setting
    try:
        yield
    finally:
        SETTINGS[kernel] = before


def launch(
    name: str, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """Run ``kernel`` over ``grid`` with its setting; an empty grid runs nothing and counts
    nothing. Arguments are tensors (contiguous), tuples of them, ints and floats in the kernel's
    order."""
    if 0 in grid:
        return
    tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
    assert all(t.is_contiguous() for t in tensors), f"{name}: a tensor with gaps"
    setting = SETTINGS[name]
    constants = {**setting.sizes, **constants}
    target = _target.get()
    if target is not None:
        target.results.append(_compile(name, kernel, arguments, constants, target))
        return
    with _lock:
        launches[name] += 1
    if not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(tensors[0].device):
        kernel[grid](
            *arguments,
            **constants,
            num_warps=setting.num_warps,
            num_stages=setting.num_stages,
            enable_fp_fusion=False,  # k8v8 codes and dequantised keys must equal torch's bits
        )


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, tuple):
        return [tensor for part in argument for tensor in _tensors(part)]
    return [argument] if isinstance(argument, Tensor) else []


def dot_mode(dtype: torch.dtype, compute_bound: bool = False) -> str:
    """How a kernel multiplies tiles for queries of ``dtype``: fp32 exactly; 16-bit types in TF32
    where memory is the limit (it keeps all 8 bits of a code) and in bf16 where arithmetic is."""
    if dtype == torch.float32 or (interpreting() and not compiling()):
        return "ieee"
    return "bf16" if compute_bound else "tf32"


def num_splits(num_blocks: int) -> int:
    """Enough for every context of at most ``num_blocks``, see decode_attn_tiered.kernel."""
    return max(1, min(MAX_SPLITS, -(-num_blocks // MIN_BLOCKS_PER_SPLIT)))


def padded(size: int, at_least: int = 16) -> int:
    """The power of two a tile of ``size`` needs; ``tl.dot`` wants at least 16."""
    return max(at_least, triton.next_power_of_2(size))


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _type(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_type, value))
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _compile(
    name: str, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], target: _Target
) -> Compiled:
    from triton.compiler import ASTSource

    setting = SETTINGS[name]
    signature: dict[str, Any] = dict.fromkeys(constants, "constexpr")
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        signature[parameter] = _type(value)
        # what a launch would see of every allocation
        places = [(i, j) for j in range(len(value))] if isinstance(value, tuple) else [(i,)]
        if _tensors(value):
            aligned |= {place: [["tt.divisibility", 16]] for place in places}
    signature = {parameter: signature[parameter] for parameter in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, aligned)  # pyright: ignore[reportArgumentType]
    options = {
        "num_warps": setting.num_warps,
        "num_stages": setting.num_stages,
        "enable_fp_fusion": False,
    }
    done = triton.compile(source, target=target.backend, options=options)
    return Compiled(name, int(done.metadata.shared), done.asm["cubin"])
