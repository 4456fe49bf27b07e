"""Does a scan of few latent channels find what all of them would choose?

``python -m engine.bench.latent [--tokens 8192]``. Random latents of K2.5's sizes (512 channels and
64 rotary ones, 64 heads), whose variance falls as 1 / i in a random basis; one choice for all heads
by the sum of their softmax weights. Printed: recall of the exact choice by the number of scanned
channels, with the latents turned to the principal axes of another sample (engine.model.latent_axes)
and as they are, and of the two-bit scan of all channels. Synthetic: no trained MLA model fits here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.sequence import view_of
from engine.model.latent_axes import principal_axes

RANK, ROTARY, HEADS = 512, 64, 64


@dataclass(frozen=True, slots=True)
class Sample:
    """latents [T, R], rotary [T, D]; queries [n, A, R] and their rotary parts [n, A, D]; axes
    [R, R]: of other latents of the kind."""

    latents: Tensor
    rotary: Tensor
    queries: Tensor
    rotary_queries: Tensor
    axes: Tensor


def sample(tokens: int, num_queries: int, seed: int = 1) -> Sample:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(normal(RANK, RANK))[0]
    spectrum = torch.arange(1, RANK + 1).float() ** -0.5
    mean = 0.1 * normal(RANK)
    latents, others = ((normal(tokens, RANK) * spectrum) @ basis.T + mean for _ in range(2))
    # what a head asks for stays its own from query to query
    asked = 0.4 * normal(HEADS, RANK)
    queries = torch.stack([normal(HEADS, RANK) + asked for _ in range(num_queries)])
    return Sample(
        latents,
        0.3 * normal(tokens, ROTARY),
        queries,
        normal(num_queries, HEADS, ROTARY),
        principal_axes(others),
    )


def report(tokens: int, topk: int, num_queries: int) -> Iterator[str]:
    made = sample(tokens, num_queries)
    yield (
        f"{tokens} tokens, {HEADS} heads, {RANK} + {ROTARY} channels; {topk} tokens chosen from "
        f"{4 * topk} candidates, {num_queries} queries"
    )
    yield f"{'scanned':<26}{'turned':>8}{'as is':>8}"
    axes = (made.axes, torch.eye(RANK))
    for dims in (32, 64, 96, 128):
        found = [recall(made, turn, topk, index="latent", latent_dims=dims) for turn in axes]
        yield f"{f'{dims} + {ROTARY} in 8 bits':<26}{found[0]:>8.3f}{found[1]:>8.3f}"
    found = [recall(made, turn, topk, index="codes") for turn in axes]
    yield f"{f'{RANK} + {ROTARY} in 2 bits':<26}{found[0]:>8.3f}{found[1]:>8.3f}"


def recall(made: Sample, turn: Tensor, topk: int, **changes: object) -> float:
    """Share of the exact choice; ``turn`` [R, R] is applied to latents and queries."""
    k = torch.cat([made.latents @ turn, made.rotary], dim=-1)[:, None]
    view = view_of(k, None, 1024, value_dim=RANK)
    q = 8 * torch.cat([made.queries @ turn, made.rotary_queries], dim=-1)
    base = {"topk": topk, "dense_below": 0, "native": "off"}

    def chosen(row: Tensor, **more: object) -> set[int]:
        config = HybridConfig.for_latent(**(base | more))
        selected = attend_hybrid(row, view, config).selected
        assert selected is not None, "a long context is sparse"
        return set(selected.flatten().tolist()) - {-1}

    shares: list[float] = []
    for row in q:
        exact = chosen(row, candidates=len(k), index="bf16")
        shares.append(len(exact & chosen(row, candidates=4 * topk, **changes)) / len(exact))
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--queries", type=int, default=3)
    options = parser.parse_args()
    for line in report(options.tokens, options.topk, options.queries):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
