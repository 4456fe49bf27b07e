"""Samples to padded micro-batches by a token budget, in an order that is a function of the samples.

Shapes: B sequences, T longest length, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parl.trajectory import TrainingSample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """token_ids int64 [B, T]; lengths int64 [B]; mask bool [B, T] (trained tokens); old_logprobs,
    advantages float32 [B, T]; experts int64 [B, T, L, K] or None; selections int32
    [B, T, M, G, P | 1, S] or None; codes uint8 [B, W, bytes] of blocks 1 .. W or None, of which
    num_codes int64 [B] are not padding."""

    token_ids: Tensor
    lengths: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    experts: Tensor | None
    selections: Tensor | None = None
    codes: Tensor | None = None
    num_codes: Tensor | None = None


def split(samples: Sequence[TrainingSample], max_tokens: int) -> list[list[int]]:
    """Indices of ``samples`` in micro-batches of at most ``max_tokens`` padded tokens (a longer
    sample is alone). Sorted by (length, key): little padding, and no dependence on input order."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i].token_ids), samples[i].key))
    batches: list[list[int]] = []
    for index in order:
        length = len(samples[index].token_ids)
        if batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def shards(samples: Sequence[TrainingSample], count: int) -> list[list[int]]:
    """Indices for ``count`` ranks, balanced by tokens (longest first to the lightest rank).

    A rank may get nothing when there are fewer samples than ranks; it then joins the all-reduce
    with zero gradients.
    """
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), samples[i].key))
    loads = [0] * count
    parts: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        rank = loads.index(min(loads))
        parts[rank].append(index)
        loads[rank] += len(samples[index].token_ids)
    return [sorted(part) for part in parts]


def micro_batches(
    samples: Sequence[TrainingSample],
    advantages: Sequence[float],
    max_tokens: int,
    *,
    with_experts: bool,
    with_selections: bool = False,
    with_codes: bool = False,
) -> Iterator[MicroBatch]:
    """Padded tensors, built one at a time."""
    for indices in split(samples, max_tokens):
        chosen = [samples[i] for i in indices]
        batch = _pad(chosen, [advantages[i] for i in indices], with_experts)
        if with_selections:
            batch = replace(batch, selections=_selections(chosen))
        yield _with_codes(batch, chosen) if with_codes else batch


def _selections(samples: Sequence[TrainingSample]) -> Tensor | None:
    """Padded with -1: nothing is chosen. None where a sample has none."""
    known = [s.selections for s in samples if s.selections is not None]
    if not known or len(known) < len(samples):
        return None
    longest = max(len(s.token_ids) for s in samples)
    padded = np.full((len(samples), longest, *known[0].shape[1:]), -1, np.int32)
    for row, selections in enumerate(known):
        padded[row, : len(selections)] = selections
    return torch.from_numpy(padded)


def _with_codes(batch: MicroBatch, samples: Sequence[TrainingSample]) -> MicroBatch:
    """As it is where a sample has none."""
    known = [s.codes for s in samples if s.codes is not None]
    if len(known) < len(samples):
        return batch
    counts = [len(codes) for codes in known]
    padded = np.zeros((len(samples), max(counts), known[0].shape[1]), np.uint8)
    for row, codes in enumerate(known):
        padded[row, : len(codes)] = codes
    return replace(batch, codes=torch.from_numpy(padded), num_codes=torch.tensor(counts))


def _pad(
    samples: Sequence[TrainingSample], advantages: Sequence[float], with_experts: bool
) -> MicroBatch:
    batch, longest = len(samples), max(len(s.token_ids) for s in samples)
    ids = np.zeros((batch, longest), np.int64)
    mask = np.zeros((batch, longest), bool)
    old = np.zeros((batch, longest), np.float32)
    gain = np.zeros((batch, longest), np.float32)
    experts = None
    if with_experts and all(s.experts is not None for s in samples):
        first = samples[0].experts
        assert first is not None
        experts = np.zeros((batch, longest, *first.shape[1:]), np.int64)
        # the last position predicts nothing; distinct ids keep its padding a legal routing
        experts[:] = np.arange(first.shape[2])
    for row, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
        length = len(sample.token_ids)
        assert length and not sample.loss_mask[0], (
            f"sample {sample.key} of {length} tokens trains on its first one; nothing predicts it"
        )
        ids[row, :length] = sample.token_ids
        mask[row, :length] = sample.loss_mask != 0
        old[row, :length] = sample.logprobs
        gain[row, :length] = advantage
        if experts is not None:
            assert sample.experts is not None
            experts[row, : len(sample.experts)] = sample.experts
    return MicroBatch(
        torch.from_numpy(ids),
        torch.tensor([len(s.token_ids) for s in samples]),
        torch.from_numpy(mask),
        torch.from_numpy(old),
        torch.from_numpy(gain),
        None if experts is None else torch.from_numpy(experts),
    )
