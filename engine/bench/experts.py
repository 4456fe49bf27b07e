"""How fast are routed experts? ``python -m engine.bench.experts``.

Forward and backward of the experts of one layer, for the same routing and weights: ours, a loop
over experts in plain torch, and transformers' two implementations (its eager loop and its grouped
matrix product), alternately in one process on one thread. Times are CPU seconds of the thread, the
best of the repeats; peak memory is what resident memory rose by. Only ratios travel between
machines.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from engine.model.experts import GroupedExperts

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [N, H], used int64 [N, K], weights [N, K], gate_up [E, 2I, H], down [E, H, I]) -> [N, H]"""


@dataclass(frozen=True, slots=True)
class Shape:
    num_tokens: int = 4096
    num_experts: int = 64
    top_k: int = 8
    hidden: int = 512
    width: int = 256

    def inputs(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """used, grad of the output, and (x, gate_up, down); routing weights follow from used."""
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(self.num_tokens, self.num_experts, generator=generator)
        used = scores.topk(self.top_k).indices.sort(dim=-1).values
        x = torch.randn(self.num_tokens, self.hidden, generator=generator)
        gate_up = torch.randn(
            self.num_experts, 2 * self.width, self.hidden, generator=generator
        ).mul_(0.03)
        down = torch.randn(self.num_experts, self.hidden, self.width, generator=generator)
        return used, torch.randn(x.shape, generator=generator), (x, gate_up, down.mul_(0.03))


@dataclass(slots=True)
class Result:
    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    outputs: list[Tensor] = field(default_factory=list)
    """Output and the gradients of x, weights, gate_up and down, of the last repeat."""


def loop(x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert after the other in plain torch, as a first implementation would."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        rows, slots = (used == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, slots, None]
        out = out.index_add(0, rows, part)
    return out


def transformers_experts(shape: Shape, implementation: str) -> Experts:
    config = DeepseekV3Config(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = DeepseekV3Experts(config)

    def run(x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tensors = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(module, tensors, (x, used, weights))

    return run


def measure(shape: Shape, num_repeats: int) -> dict[str, Result]:
    """Alternates the implementations; the first round warms up and is not counted."""
    torch.set_num_threads(1)
    runs: dict[str, Any] = {
        "ours": GroupedExperts.apply,
        "loop over experts": loop,
        "transformers eager": transformers_experts(shape, "eager"),
        "transformers grouped_mm": transformers_experts(shape, "grouped_mm"),
    }
    used, grad, tensors = shape.inputs()
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(used.shape, generator=generator)
    results = {name: Result() for name in runs}
    for repeat in range(num_repeats + 1):
        for name, run in runs.items():
            x, gate_up, down = (tensor.clone().requires_grad_() for tensor in tensors)
            share = weights.clone().requires_grad_()
            before = _reset_peak()
            begin = time.thread_time()
            out = run(x, used, share, gate_up, down)
            out.backward(grad)
            spent = time.thread_time() - begin
            result = results[name]
            if repeat:
                result.seconds.append(spent)
                result.peak_mib = max(result.peak_mib, _memory_mib("VmHWM") - before)
            grads = [t.grad for t in (x, share, gate_up, down) if t.grad is not None]
            result.outputs = [out.detach(), *grads]
    return results


def _reset_peak() -> float:
    """Start the kernel's high-water mark anew; resident MiB now, without what malloc hoards: an
    implementation that may reuse it would look small."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_mib("VmRSS")


def _memory_mib(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {key}"
    return int(found[1]) / 1024


def report(shape: Shape, results: dict[str, Result]) -> str:
    ours = min(results["ours"].seconds)
    lines = [
        f"{shape.num_tokens} tokens, {shape.num_experts} experts top-{shape.top_k}, hidden "
        f"{shape.hidden}, width {shape.width}, fp32, forward + backward, 1 thread of "
        f"{os.cpu_count()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{platform.machine()}"
    ]
    for name, result in results.items():
        best = min(result.seconds)
        lines.append(
            f"{name:<24} {best:6.3f} s = {best / ours:5.2f} x ours, peak {result.peak_mib:6.0f} MiB"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape = Shape(num_tokens=options.tokens, hidden=options.hidden, width=options.width)
    sys.stdout.write("the table comes at the end; the default shape takes a minute of one core\n")
    sys.stdout.flush()
    sys.stdout.write(report(shape, measure(shape, options.repeats)) + "\n")


if __name__ == "__main__":
    main()
