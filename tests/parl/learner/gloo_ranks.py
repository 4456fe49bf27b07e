"""What one of several gloo processes does in test_gloo_ranks; spawned, so a module of its own."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parl.learner.batching import shards
from parl.learner.config import LearnerConfig
from parl.learner.learner import TokenLearner
from parl.learner.optim.peers import Peers
from parl.trajectory import TrainingSample
from tests.parl.learner.tiny import make_advantages, make_model, make_samples

WORLD = 4
CASES = [(2, 12), (4, 12), (4, 3)]
"""(ranks, samples); the last leaves a rank without any."""


class Gloo:
    """Collectives of a group, counted; keeps the largest sum: the gradient."""

    def __init__(self, group: dist.ProcessGroup, rank: int, count: int) -> None:
        self.rank, self.count, self._group = rank, count, group
        self.calls: Counter[str] = Counter()
        self.gradient = torch.empty(0)

    def sum(self, tensor: Tensor) -> Tensor:
        self.calls["sum"] += 1
        dist.all_reduce(tensor, group=self._group)
        if tensor.numel() > self.gradient.numel():
            self.gradient = tensor.clone()
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        self.calls["max"] += 1
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.calls["gather"] += 1
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(found, tensor, group=self._group)
        return found


@dataclass
class Outcome:
    gradient: Tensor
    step: Tensor
    """All parameters after minus before, of one policy-gradient step."""
    final: Tensor
    """After a supervised step besides."""


def rows_of(count: int) -> tuple[list[TrainingSample], list[float]]:
    """Ragged; experts 2 and 3 get no token of any rank."""
    samples = [
        replace(
            s,
            experts=None
            if s.experts is None
            else np.zeros_like(s.experts) + np.array([0, 1], np.int16),
        )
        for s in make_samples(make_model())[:count]
    ]
    return samples, make_advantages(count)


def flat(learner: TokenLearner) -> Tensor:
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def train(config: LearnerConfig, count: int, gloo: Gloo | None, *, share: bool) -> Outcome:
    samples, gains = rows_of(count)
    part = list(range(count))
    if gloo is None:
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.clone())
            return tensor

        learner = TokenLearner(make_model(), config, keep)
    else:
        part = shards(samples, gloo.count)[gloo.rank]
        peers = Peers(gloo.rank, gloo.count, gloo.gather) if share else None
        learner = TokenLearner(make_model(), config, gloo.sum, gloo.max, peers)
    before = flat(learner)
    mine, gain = [samples[i] for i in part], [gains[i] for i in part]
    learner.update(mine, gain)
    gradient = max(kept, key=Tensor.numel) if gloo is None else gloo.gradient
    step = flat(learner) - before
    learner.sft_update(mine, 1e-3, 1e-4)
    return Outcome(gradient.clone(), step, flat(learner))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def compare(group: dist.ProcessGroup, rank: int, count: int, num_samples: int) -> dict[str, object]:
    """One rank's figures against the same samples on one rank."""
    # no head reaches tau = 100: a clip would be most of the step and hide the rest
    exact = LearnerConfig.model_validate(
        {
            "optim": {"ns_dtype": "float32", "profile": "seed"},
            "router_bias_rate": 0.01,
        }
    )
    gloo = Gloo(group, rank, count)
    together = train(exact, num_samples, gloo, share=True)
    alone = train(exact, num_samples, None, share=False)
    calls = dict(gloo.calls)
    default = LearnerConfig.model_validate({"optim": {"qk_clip": 0.5}})
    apart = train(default, num_samples, Gloo(group, rank, count), share=False)
    shared = train(default, num_samples, Gloo(group, rank, count), share=True)
    return {
        "samples": len(shards(rows_of(num_samples)[0], count)[rank]),
        "gradient": distance(together.gradient, alone.gradient),
        "step": distance(together.step, alone.step),
        "calls": calls,
        "same_bits": torch.equal(apart.final, shared.final),
        "sum": float(together.final.double().sum()),
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    groups = {count: dist.new_group(list(range(count))) for count in (2, WORLD)}
    results: list[dict[str, object] | None] = []
    for count, num_samples in CASES:
        group = groups[count]
        inside = rank < count
        assert isinstance(group, dist.ProcessGroup) or not inside, f"rank {rank} is in no group"
        results.append(
            compare(group, rank, count, num_samples)
            if inside and isinstance(group, dist.ProcessGroup)
            else None
        )
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
