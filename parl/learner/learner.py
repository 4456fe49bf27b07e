"""TokenLearner: parameters, optimizers and one step at a time. Pure torch, no Ray.

With fixed threads its results are a function of state and input, bit for bit: samples are sorted,
micro-batches follow from lengths, gradients are accumulated in that order.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.model.model import PolicyModel
from parl.learner.balance import move_router_bias
from parl.learner.batching import micro_batches
from parl.learner.config import LearnerConfig, OptimConfig
from parl.learner.forward import TokenStats, token_stats
from parl.learner.losses import LOSSES, LossTokens
from parl.learner.mismatch import correction_weights
from parl.learner.optim.build import build_optimizers
from parl.learner.optim.expert_clip import ExpertClip
from parl.learner.optim.peers import Peers
from parl.learner.optim.qk_clip import QKClip
from parl.learner.state import load_state, save_state
from parl.trajectory import TrainingSample

log = structlog.get_logger(__name__)

AllReduce = Callable[[Tensor], Tensor]
"""Sum or maximum of a tensor over all ranks; identity for one rank."""


class TokenLearner:
    """Satisfies parl.rounds.ports.LearnerPort in process; RLlib's Learner delegates to it."""

    def __init__(
        self,
        model: PolicyModel,
        config: LearnerConfig,
        all_reduce: AllReduce | None = None,
        all_max: AllReduce | None = None,
        peers: Peers | None = None,
    ) -> None:
        """``peers``: ranks that share the work of Muon; None = each does all of it. Whatever a
        rank's samples, none included, all ranks make the same collective calls."""
        self.model = model
        self.config = config
        self._all_reduce = all_reduce or (lambda tensor: tensor)
        self._all_max = all_max or (lambda tensor: tensor)
        self._peers = peers
        optim = config.optim
        self._qk_clip = QKClip(model, optim.qk_clip, optim.qk_mode, optim.qk_alpha)
        self._clamp_fraction = 0.0
        self._build_optimizers()
        self.num_updates = 0

    def _build_optimizers(self) -> None:
        self.muon, self.adamw = build_optimizers(self.model, self.config.optim, self._peers)
        self._expert_clip = ExpertClip(self.model, self.config.optim.expert_clip)

    def reset_optimizers(self) -> None:
        """Forget momentum and restore configured rates (between warm start and RL)."""
        self._build_optimizers()

    def update(
        self, samples: Sequence[TrainingSample], advantages: Sequence[float]
    ) -> dict[str, float]:
        """One policy-gradient step, an advantage a sample. The mismatch metrics compare with the
        engine before the step. Empty input (an idle rank) still joins the all-reduce."""
        assert len(samples) == len(advantages), (
            f"{len(samples)} samples with {len(advantages)} advantages"
        )
        tally = _Tally()
        norm = self._num_tokens(samples)
        num_sequences = self._num_sequences(samples)
        keep = [
            i for i, advantage in enumerate(advantages) if advantage != 0 or not self._skips_zero
        ]
        loss_fn = LOSSES[self.config.loss.kind]
        self._zero_grad()
        for batch in micro_batches(
            [samples[i] for i in keep],
            [advantages[i] for i in keep],
            self.config.micro_batch_tokens,
            with_experts=self.config.replay_experts,
            with_selections=self.config.replay_selections,
            with_codes=self.config.replay_codes,
        ):
            stats = token_stats(self.model, batch, self._qk_clip.watch, self._qk_clip.cap)
            tokens, dropped = self._loss_tokens(stats, norm, num_sequences)
            loss, masked = loss_fn(tokens, self.config.loss)
            loss.backward()
            tally.add(loss, stats, int(masked) + dropped)
        metrics = tally.metrics()
        scale = rate_scale(self.num_updates, self.config.optim)
        self._set_rates(self.config.optim.muon_lr * scale, self.config.optim.adamw_lr * scale)
        loads = self._loads(tally.loads) if self._wants_loads else None
        metrics |= self._step(loads)
        metrics["rate_scale"] = scale
        if self.config.router_bias_rate and loads is not None:
            move_router_bias(self.model, loads, self.config.router_bias_rate)
        metrics["num_tokens"] = norm
        metrics["num_sequences"] = float(len(keep))
        metrics["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.num_updates += 1
        return metrics

    def sft_update(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        """One cross-entropy step on masked tokens, with the given rates."""
        norm = self._num_tokens(samples)
        self._zero_grad()
        total, correct = 0.0, 0
        for batch in micro_batches(
            samples, [0.0] * len(samples), self.config.micro_batch_tokens, with_experts=False
        ):
            stats = token_stats(self.model, batch, self._qk_clip.watch, self._qk_clip.cap)
            loss = -stats.logprobs.sum() / norm
            loss.backward()
            total += loss.item()
            correct += int((stats.logprobs > -0.693).sum())
        self._set_rates(muon_lr, adamw_lr)
        stepped = self._step(None)
        return {
            "loss": total,
            **stepped,
            "likely_share": correct / norm,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Copies, so that a later step cannot change what was published. Warns when the last step
        trained under a clamp of scores that no engine has."""
        if self._clamp_fraction > 0:
            log.warning(
                "weights trained under a clamp",
                logit_clamp_fraction=self._clamp_fraction,
                why="scores over optim.qk_clip were clamped in the last step; no engine clamps",
                hint="qk_clip_mode='both' or 'weights' brings the weights down; vLLM must not "
                "get these",
            )
        return {
            name: tensor.detach().cpu().numpy().copy()
            for name, tensor in self.model.state_dict().items()
        }

    def save(self, folder: Path) -> None:
        clip = self._expert_clip.state()
        save_state(self.model, self.muon, self.adamw, self.num_updates, folder, clip)

    def restore(self, folder: Path) -> None:
        self.num_updates, clip = load_state(self.model, self.muon, self.adamw, folder)
        self._expert_clip.load(clip)

    def _num_tokens(self, samples: Sequence[TrainingSample]) -> float:
        """Generated tokens of the whole batch, over all ranks."""
        local = float(sum(int(s.loss_mask.sum()) for s in samples))
        total = float(self._all_reduce(torch.tensor(local, dtype=torch.float64)))
        assert total > 0, f"no token of {len(samples)} samples is trained on"
        return total

    def _num_sequences(self, samples: Sequence[TrainingSample]) -> float:
        """Sequences of the whole batch, over all ranks, that train any token."""
        local = float(sum(bool(s.loss_mask.any()) for s in samples))
        return float(self._all_reduce(torch.tensor(local, dtype=torch.float64)))

    def _loss_tokens(
        self, stats: TokenStats, num_tokens: float, num_sequences: float
    ) -> tuple[LossTokens, int]:
        """What the loss sees, and the tokens that mismatch correction dropped."""
        config = self.config.loss
        own = config.old == "learner"
        tokens = LossTokens(
            stats.logprobs,
            stats.logprobs.detach() if own else stats.old_logprobs,
            stats.advantages,
            stats.sequence,
            num_tokens,
            num_sequences,
        )
        weights, dropped = correction_weights(tokens, stats.old_logprobs, config.correction)
        return (tokens if weights is None else replace(tokens, weights=weights)), dropped

    @property
    def _skips_zero(self) -> bool:
        # k2_sequence pulls every sequence to the old policy, k25 every token when tau says so
        return self.config.skip_zero_advantage and self.config.loss.tau == 0

    @property
    def _wants_loads(self) -> bool:
        return bool(self.config.router_bias_rate) or self._expert_clip.is_on

    def _loads(self, loads: Tensor | None) -> Tensor:
        """The router's own choices over all ranks, float64 [L, E]."""
        shape = (self.model.config.num_moe_layers, self.model.config.n_routed_experts)
        local = torch.zeros(shape, dtype=torch.float64) if loads is None else loads.double()
        return self._all_reduce(local)

    def _set_rates(self, muon_lr: float, adamw_lr: float) -> None:
        for group in self.muon.param_groups:
            group["lr"] = muon_lr
        for group in self.adamw.param_groups:
            group["lr"] = adamw_lr

    def _zero_grad(self) -> None:
        self.muon.zero_grad(set_to_none=True)
        self.adamw.zero_grad(set_to_none=True)

    def _step(self, loads: Tensor | None) -> dict[str, float]:
        """All-reduce, clip by the global norm and by expert, step both optimizers, clip the heads;
        returns the norm and the highest attention score, both before their clip. ``loads``: None
        where experts are not counted (supervised steps)."""
        parameters = [
            p for g in (self.muon, self.adamw) for pg in g.param_groups for p in pg["params"]
        ]
        flat = torch.cat(
            [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]
        )
        flat = self._all_reduce(flat)
        norm = float(torch.linalg.vector_norm(flat))
        flat = flat * min(1.0, self.config.optim.grad_clip / (norm + 1e-6))
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        metrics = {"grad_norm": norm}
        if loads is not None and self._expert_clip.is_on:
            metrics |= self._expert_clip.step(self.muon, loads)
        self.muon.step()
        self.adamw.step()
        highest = self._qk_clip.step(self._all_max(self._qk_clip.max_scores.clone()))
        metrics["max_attention_score"] = highest
        counts = self._qk_clip.take_counts()
        if counts is not None:
            clamped, scores = self._all_reduce(counts).tolist()
            self._clamp_fraction = clamped / max(scores, 1.0)
            metrics["logit_clamp_fraction"] = self._clamp_fraction
        return metrics


def rate_scale(num_updates: int, config: OptimConfig) -> float:
    """Share of the configured rates for the update after ``num_updates`` others, in
    [final_share, 1]: a function of the count alone, so that a resumed run takes equal steps."""
    if not config.decay_updates:
        return 1.0
    done = min(1.0, num_updates / config.decay_updates)
    return 1.0 - done * (1.0 - config.final_share)


class _Tally:
    """Sums over micro-batches, in float64."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.abs_dlogp = self.kl = 0.0
        self.max_dlogp = 0.0
        self.tokens = self.clean = self.masked = self.flips = self.choices = 0
        self.selection_flips = self.selections = 0
        self.code_flips = self.codes = 0
        self.loads: Tensor | None = None

    def add(self, loss: Tensor, stats: TokenStats, masked: int) -> None:
        delta = (stats.logprobs.detach() - stats.old_logprobs).double()
        same = delta[~stats.flipped].abs()
        self.loss += loss.item()
        self.entropy += float(stats.entropy.double().sum())
        self.tokens += len(delta)
        self.clean += len(same)
        self.masked += masked
        self.flips += stats.flips
        self.choices += stats.choices
        self.selection_flips += stats.selection_flips
        self.selections += stats.selections
        self.code_flips += stats.code_flips
        self.codes += stats.codes
        self.loads = stats.loads if self.loads is None else self.loads + stats.loads
        if len(same):
            self.abs_dlogp += float(same.sum())
            self.max_dlogp = max(self.max_dlogp, float(same.max()))
        # k3 estimator of KL(engine || learner): r - 1 - log r (Schulman, "Approximating KL")
        self.kl += float((delta.exp() - 1 - delta).sum())

    def metrics(self) -> dict[str, float]:
        tokens, clean = max(self.tokens, 1), max(self.clean, 1)
        found = {
            "loss": self.loss,
            "entropy": self.entropy / tokens,
            "max_abs_dlogp": self.max_dlogp,
            "mean_abs_dlogp": self.abs_dlogp / clean,
            "mismatch_kl": self.kl / tokens,
            "masked_share": self.masked / tokens,
            "expert_flip_share": self.flips / max(self.choices, 1),
        }
        if self.selections:
            found["selection_flip_share"] = self.selection_flips / self.selections
        if self.codes:
            found["kv_code_flip_share"] = self.code_flips / self.codes
        return found
