"""attend_sequence for a padded batch, in a few large products: what a learner can afford.

Shapes: B sequences, T longest length, A query heads, G key-value heads, P = A / G, D key size,
V value size, K chosen tokens a head. Whole [T, T] matrices of scores, so for contexts of some
thousand tokens at most. Where the scan would have to leave warm tokens out (more far tokens than
``candidates``), or another index or unit is asked for, the sequences go through attend_sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.recorded import CodeFlips, CodesOfLayer, code_keys, code_values
from engine.attention.retrieve import selection_width
from engine.attention.score_cap import ScoreCap
from engine.attention.select import choose, listed
from engine.attention.sequence import attend_sequence
from engine.attention.summary import Summarise
from engine.attention.topology import causal_mask, far_mask, near_mask, warm_end, warm_mask
from engine.errors import AttentionError
from engine.kvcache.quantise import BLOCK, Profile


@dataclass(frozen=True, slots=True)
class BatchAttended:
    """out [B, T, A, V], finite numbers that mean nothing where padded; selected int32
    [B, T, G, P, K] ([B, T, G, 1, K] when shared): the choice of these queries and keys, whether it
    was read or a recorded one; None unless asked for."""

    out: Tensor
    selected: Tensor | None


def attend_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: Tensor,
    config: HybridConfig,
    hot: int,
    profile: Profile = "k8v8",
    *,
    value_dim: int | None = None,
    replay: Tensor | None = None,
    with_choice: bool = False,
    recorded: CodesOfLayer | None = None,
    flips: CodeFlips | None = None,
    summarise: Summarise | None = None,
    cap: ScoreCap | None = None,
) -> BatchAttended:
    """q [B, T, A, D], k [B, T, G, D], v [B, T, G, V], zero where padded on the right; lengths
    int64 [B]; v None: latent attention, see attend_sequence. ``replay`` int32 [B, T, G, P | 1, K],
    -1 fills. ``recorded``, ``flips``, ``summarise``, ``cap``: see attend_sequence.
    Scores are q.k / sqrt(D). AttentionError when what was recorded does not fit."""
    config.check_hot(hot)
    _check_replay(q, k, config, replay)
    if recorded is not None:
        recorded.check(lengths, hot)
    longest = q.shape[1]
    num_far = max(0, longest - config.window - BLOCK)
    whole = config.topk_unit == "token" and config.index in ("codes", "int8", "bf16", "latent")
    coding = _Coding(profile, hot, longest, recorded, flips, summarise)
    if not whole or num_far > config.candidates or config.summary_weight > 0:
        return _one_by_one(q, k, v, lengths, config, coding, value_dim, replay, with_choice, cap)
    groups = k.shape[2]
    queries = (q.float() * q.shape[-1] ** -0.5).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    keys, warm_keys = coding.both(k, is_key=True)
    if v is None:
        values, warm_values = keys[..., :value_dim], warm_keys[..., :value_dim]
    else:
        values, warm_values = coding.both(v, is_key=False)
    steps = torch.arange(1, longest + 1)
    # without codes nothing is warm, but the sink and the window are what they are
    warm = warm_mask(steps, longest, hot if profile != "full" else longest)
    logits = _scores(queries, keys)
    if bool(warm.any()):
        logits = torch.where(warm, _scores(queries, warm_keys), logits)
    own = None
    if replay is None or with_choice:
        own = _choice(queries.detach(), keys.detach(), warm_keys.detach(), warm, steps, config)
    seen = _seen(own if replay is None else replay, steps, config)
    if cap is not None:
        real = steps <= lengths[:, None]
        logits = cap.clamp(logits, seen & real[:, None, None, :, None])
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    out = torch.matmul(weights.masked_fill(warm, 0.0), values[:, :, None])
    if bool(warm.any()):
        out = out + torch.matmul(weights.masked_fill(~warm, 0.0), warm_values[:, :, None])
    return BatchAttended(out.permute(0, 3, 1, 2, 4).flatten(2, 3), own if with_choice else None)


@dataclass(frozen=True, slots=True)
class _Coding:
    profile: Profile
    hot: int
    longest: int
    recorded: CodesOfLayer | None
    flips: CodeFlips | None
    summarise: Summarise | None

    def both(self, x: Tensor, *, is_key: bool) -> tuple[Tensor, Tensor]:
        """x [B, T, G, D] as it is and as it reads once warm: fp32 [B, G, T, D] each. Only blocks
        that some query of the batch may read as codes are coded."""
        plain = x.float().transpose(1, 2)
        end = warm_end(self.longest, self.hot) if self.profile != "full" else BLOCK
        if end <= BLOCK:
            return plain, plain
        batch = len(x)
        blocks = plain[:, :, BLOCK:end].unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1)
        how = (self.profile, self.recorded, self.flips)
        coded = code_keys(blocks, *how)[0] if is_key else code_values(blocks, *how)
        middle = coded.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        return plain, torch.cat([plain[:, :, :BLOCK], middle, plain[:, :, end:]], dim=2)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[B, G, P, T, D] x [B, G, T, D] -> [B, G, P, T, T]"""
    return torch.matmul(queries, keys[:, :, None].transpose(-1, -2))


@torch.no_grad()
def _choice(
    queries: Tensor, keys: Tensor, warm_keys: Tensor, warm: Tensor, steps: Tensor, c: HybridConfig
) -> Tensor:
    """Every far token is a candidate, so the choice is top-k of exact scores, summed in fp64 and
    rounded as index.exact_scores does: int32 [B, T, G, P | 1, K]."""
    batch, groups, _, longest, _ = queries.shape
    far = far_mask(steps, longest, c.window)
    far &= (steps > c.dense_below)[:, None]
    if c.index == "none":
        far = torch.zeros_like(far)
    positions = torch.arange(longest).expand(longest, groups, longest)
    found = []
    for row in range(batch):
        exact = _scores(queries[row : row + 1].double(), keys[row : row + 1].double()).float()
        if bool(warm.any()):
            coded = _scores(queries[row : row + 1].double(), warm_keys[row : row + 1].double())
            exact = torch.where(warm, coded.float(), exact)
        # queries in the place of choose's rows: [T, G, P, T]
        logits = exact[0].permute(2, 0, 1, 3).masked_fill(~far[:, None, None], -torch.inf)
        chosen = choose(logits, c)[:, :, : 1 if c.topk_shared else None]
        found.append(listed(chosen, positions, selection_width(c)))
    return torch.stack(found)


def _seen(selected: Tensor | None, steps: Tensor, config: HybridConfig) -> Tensor:
    """bool [B, G, P | 1, T, T]"""
    assert selected is not None, "chosen or recorded"
    longest = len(steps)
    places = selected.long().masked_fill(selected < 0, longest)
    mask = torch.zeros(*selected.shape[:-1], longest + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, places, True)[..., :-1].permute(0, 2, 3, 1, 4)
    causal = causal_mask(steps, longest)
    near = near_mask(steps, longest, config.window)
    near = near | (causal & (steps <= config.dense_below)[:, None])
    return (mask | near) & causal


def _check_replay(q: Tensor, k: Tensor, config: HybridConfig, replay: Tensor | None) -> None:
    if replay is None:
        return
    batch, longest, heads = q.shape[:3]
    groups = k.shape[2]
    choices = 1 if config.topk_shared else heads // groups
    shape = (batch, longest, groups, choices, selection_width(config))
    if replay.shape != shape:
        raise AttentionError(
            f"recorded selections have shape {tuple(replay.shape)}, these queries need {shape}"
        )
    last = torch.arange(longest)[:, None, None, None]
    future = replay[replay > last]
    if len(future):
        raise AttentionError(
            f"recorded selections name position {int(future.max())}, which lies after a query that "
            "is said to have read it"
        )


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: Tensor,
    config: HybridConfig,
    coding: _Coding,
    value_dim: int | None,
    replay: Tensor | None,
    with_choice: bool,
    cap: ScoreCap | None,
) -> BatchAttended:
    longest = q.shape[1]
    outs, choices = [], []
    for row, length in enumerate(lengths.tolist()):
        here = (q[row, :length], k[row, :length], None if v is None else v[row, :length])
        chosen = None if replay is None else replay[row, :length]
        codes = None if coding.recorded is None else coding.recorded.of_row(row)
        attend = partial(
            attend_sequence,
            *here,
            config,
            coding.hot,
            coding.profile,
            value_dim=value_dim,
            recorded=codes,
            summarise=coding.summarise,
        )
        done = attend(replay=chosen, flips=coding.flips, cap=cap)
        outs.append(_to_length(done.out, longest))
        if with_choice:
            if chosen is not None:
                with torch.no_grad():
                    done = attend()
            choices.append(_to_length(done.selected, longest, -1))
    return BatchAttended(torch.stack(outs), torch.stack(choices) if with_choice else None)


def _to_length(x: Tensor, length: int, fill: float = 0.0) -> Tensor:
    pad = [0, 0] * (x.dim() - 1) + [0, length - len(x)]
    return torch.nn.functional.pad(x, pad, value=fill)
