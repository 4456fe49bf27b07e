"""Log-probabilities of trained tokens under the current policy; the only coupling to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.recorded import CodeFlips, RecordedCodes
from engine.attention.score_cap import ScoreCap
from engine.kvcache.layout import CacheLayout
from engine.model.model import PolicyModel
from engine.model.sequences import Watch, forward_sequences
from parl.learner.batching import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Over the n trained tokens of a micro-batch: logprobs (with gradient), entropy (nats), old
    logprobs, advantages float32 [n]; sequence int64 [n], the row of the batch; flipped bool [n]:
    the router, left alone, would have sent the predicting position elsewhere than the engine did,
    or its queries would have read another far token. flips / choices count routings of all
    positions, selection_flips / selections far tokens that were recorded and would not be chosen
    now; code_flips / codes stored numbers of coded keys and values that were recorded and would be
    others now; loads int64 [L, E] counts the router's own choices."""

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    flipped: Tensor
    flips: int
    choices: int
    loads: Tensor
    selection_flips: int = 0
    selections: int = 0
    code_flips: int = 0
    codes: int = 0


def token_stats(
    model: PolicyModel,
    batch: MicroBatch,
    watch: Watch | None = None,
    cap: ScoreCap | None = None,
) -> TokenStats:
    """Predict token t from position t - 1 for every masked t; ``watch`` sees queries and keys,
    ``cap`` holds their scores back."""
    own = _OwnChoices(batch) if batch.selections is not None else None
    codes, code_flips = _recorded_codes(model, batch), CodeFlips()
    hidden, chosen, rows = forward_sequences(
        model,
        batch.token_ids,
        batch.lengths,
        batch.experts,
        watch,
        selections=batch.selections,
        watch_choice=None if own is None else own.add,
        codes=codes,
        code_flips=code_flips,
        cap=cap,
    )
    longest = batch.token_ids.shape[1]
    target = batch.mask.flatten().nonzero()[:, 0]
    # row number of the predicting position t - 1 among the real rows
    row_of = torch.zeros(batch.mask.numel(), dtype=torch.long)
    row_of[rows] = torch.arange(len(rows))
    source = row_of[target - 1]
    log_probs = model.logits(hidden[source]).log_softmax(dim=-1)
    picked = log_probs.gather(1, batch.token_ids.flatten()[target, None])[:, 0]
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    flipped = torch.zeros(len(target), dtype=torch.bool)
    flips, choices = 0, 0
    if batch.experts is not None:
        recorded = batch.experts.flatten(0, 1)[rows]
        # the last position of a sequence has no record; it predicts nothing
        known = (rows % longest) < (batch.lengths[rows // longest] - 1)
        differs = (recorded != chosen).any(dim=-1)
        flips, choices = int(differs[known].sum()), int(known.sum()) * differs.shape[1]
        flipped = differs.any(dim=-1)[source]
    if own is not None:
        flipped = flipped | own.differs.flatten()[target - 1]
    return TokenStats(
        picked,
        entropy,
        batch.old_logprobs.flatten()[target],
        batch.advantages.flatten()[target],
        target // longest,
        flipped,
        flips,
        choices,
        _loads(chosen, model.config.n_routed_experts),
        0 if own is None else own.flips,
        0 if own is None else own.recorded,
        code_flips.flips,
        code_flips.recorded,
    )


def _recorded_codes(model: PolicyModel, batch: MicroBatch) -> RecordedCodes | None:
    """AttentionError when the codes are of another model section."""
    if batch.codes is None:
        return None
    assert batch.num_codes is not None, "codes come with their numbers"
    layout = CacheLayout.of(model.config, model.config.attention.profile)
    return RecordedCodes(batch.codes, batch.num_codes, layout)


class _OwnChoices:
    """Compares the far tokens that the learner's queries choose with the recorded ones."""

    def __init__(self, batch: MicroBatch) -> None:
        assert batch.selections is not None, "nothing was recorded"
        self._batch = batch
        self._recorded = batch.selections
        self.differs = torch.zeros(batch.token_ids.shape, dtype=torch.bool)
        """[B, T]: some layer and head of the position would read another token."""
        self.flips = 0
        self.recorded = int((batch.selections >= 0).sum())

    def add(self, layer: int, own: Tensor) -> None:
        """own int32 [B, T, G, P | 1, S] of one layer, rising, -1 at the end."""
        recorded = self._recorded[:, :, layer]
        longest = own.shape[1]
        # the last position of a sequence has no record; it predicts nothing
        known = torch.arange(longest) < (self._batch.lengths[:, None] - 1)
        other = (own != recorded).flatten(2).any(dim=-1) & known
        self.differs |= other
        for row, position in other.nonzero().tolist():
            mine, theirs = own[row, position], recorded[row, position]
            same = (theirs[..., :, None] == mine[..., None, :]).any(dim=-1)
            self.flips += int(((theirs >= 0) & ~same).sum())


def _loads(chosen: Tensor, num_experts: int) -> Tensor:
    """int64 [N, L, K] expert ids -> int64 [L, E] counts."""
    ids = chosen.transpose(0, 1).flatten(1)
    return torch.zeros(len(ids), num_experts, dtype=torch.long).scatter_add_(
        1, ids, torch.ones_like(ids)
    )
