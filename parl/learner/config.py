"""Knobs of the learner; no torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infra.config import ConfigModel

Beta = Annotated[float, Field(ge=0, lt=1)]


QKClipMode = Literal["off", "weights", "logits", "both"]
LossKind = Literal["k25_token_mask", "k2_sequence", "ppo_clip", "grpo", "dr_grpo", "gspo", "cispo"]


class CorrectionConfig(ConfigModel):
    """For old = "learner": what the engine's other probabilities cost (parl.learner.mismatch)."""

    kind: Literal["none", "token_tis", "sequence_tis", "icepop", "sequence_mask"] = "none"
    low: float = Field(default=0.5, gt=0, lt=1)
    """Least pi_learner / pi_engine that icepop and sequence_mask let through."""
    high: float = Field(default=2.0, gt=1)
    """Largest; the truncation of both kinds of tis."""


class LossConfig(ConfigModel):
    kind: LossKind = "k25_token_mask"
    ratio_low: float = Field(default=0.5, gt=0, lt=1)
    """Tokens with pi/pi_old below this get no policy gradient (k25) or are clipped (others)."""
    ratio_high: float = Field(default=2.0, gt=1)
    tau: float = Field(default=0.0, ge=0)
    """Weight of (log pi/pi_old)^2 on every token (k25_token_mask); scale of the log-ratio
    (k2_sequence, where it must be above 0)."""
    max_tokens: int = Field(default=1024, ge=1)
    """L of dr_grpo."""
    old: Literal["engine", "learner"] = "engine"
    """Whose logprobs pi_old are: those that sampled, or the learner's own before its step (the
    decoupled objective of AReaL, arXiv 2505.24298), with ``correction`` for the difference."""
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="after")
    def _fits(self) -> LossConfig:
        if self.kind == "k2_sequence" and self.tau == 0:
            raise ValueError(
                "tau = 0 leaves k2_sequence without a gradient; expected a number above 0, K1.5's "
                "scale of rewards, such as 0.1"
            )
        if self.correction.kind != "none" and self.old == "engine":
            raise ValueError(
                f"correction {self.correction.kind!r} is for old = 'learner'; with old = 'engine' "
                "the ratio holds the engine's probabilities already"
            )
        return self


class MismatchConfig(ConfigModel):
    """When engine and learner disagree too much to go on."""

    gate: float = Field(default=0.015, gt=0)
    """Largest KL(engine || learner) a token of a healthy round."""
    patience: int = Field(default=3, ge=1)
    """Rounds in a row above it that end the run."""


class ExpertClipConfig(ConfigModel):
    """Clipping of single experts (parl.learner.optim.expert_clip)."""

    mode: Literal["off", "grad", "update"] = "off"
    """grad: an expert's gradient, which under Muon changes its weight inside the momentum only;
    update: its step."""
    kappa: float = Field(default=0.5, ge=0)
    """The threshold grows with (frequency / mean frequency)^kappa ..."""
    r_min: float = Field(default=0.25, gt=0, le=1)
    r_max: float = Field(default=2.0, ge=1)
    """... between these multiples of the median norm."""
    memory: float = Field(default=0.9, ge=0, lt=1)
    """Of the moving frequency and median."""
    min_tokens: int = Field(default=0, ge=0)
    """Cold-expert guard: an expert that got fewer routed tokens in the batch rests, neither moved
    by stale momentum nor decayed; 0 = off."""


class OptimConfig(ConfigModel):
    profile: Literal["kimi", "seed"] = "kimi"
    """kimi: MuonClip as the K2 report has it. seed: besides, experts are clipped by the frequency
    of their activation and cold ones rest, where ``experts`` does not say otherwise, and scores
    are clamped in the forward, where ``qk_clip_mode`` does not."""
    muon_lr: float = Field(default=3e-3, ge=0, allow_inf_nan=False)
    """Hidden matrices (attention, experts), RMS-matched to AdamW."""
    adamw_lr: float = Field(default=3e-4, ge=0, allow_inf_nan=False)
    """Embedding, head, norms, router."""
    decay_updates: int = Field(default=0, ge=0)
    """Both rates fall linearly from the first update to this one; 0 = constant. Muon's steps do not
    shrink with the gradient, so at a constant rate a policy that has little left to learn walks
    at random."""
    final_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the rates that is left from update ``decay_updates`` on."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    qk_clip: float = Field(default=100.0, gt=0)
    """Attention scores a head may reach (tau of QK-Clip, parl.learner.optim.qk_clip)."""
    qk_clip_mode: QKClipMode | None = None
    """weights: heads over it are scaled after the step. logits: scores over it are clamped in the
    learner's forward, which engines do not do; ``logit_clamp_fraction`` must fall to 0. None: what
    the profile says (kimi weights, seed both)."""
    qk_alpha: float = Field(default=0.5, ge=0, le=1)
    """The query's share, in the exponent, of that scaling where a head owns query and key (mla)."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Newton-Schulz of Muon: bfloat16 as the reference, which turns rounding of a gradient into
    steps of about muon_lr / 256; float32 keeps 1, 2 and 4 ranks together to rounding."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global gradient norm before the step."""
    experts: ExpertClipConfig | None = None
    """None: what the profile says."""

    @property
    def expert_clip(self) -> ExpertClipConfig:
        if self.experts is not None:
            return self.experts
        if self.profile == "seed":
            return ExpertClipConfig(mode="grad", min_tokens=1)
        return ExpertClipConfig()

    @property
    def qk_mode(self) -> QKClipMode:
        if self.qk_clip_mode is not None:
            return self.qk_clip_mode
        return "both" if self.profile == "seed" else "weights"


class LearnerConfig(ConfigModel):
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    mismatch: MismatchConfig = MismatchConfig()
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Padded tokens of one forward pass."""
    skip_zero_advantage: bool = True
    """Leave sequences without any advantage out of forward and backward; they still count in the
    norm. Their policy gradient is zero; not done when loss.tau pulls on every token."""
    replay_experts: bool = True
    """Route training tokens to the experts the engine recorded."""
    replay_selections: bool = True
    """Hybrid attention: read the far tokens that the engine recorded."""
    replay_codes: bool = True
    """Hybrid attention: read keys and values from the codes that the engine recorded, and count
    those that the learner would have set differently. engine.report_codes says what they cost;
    without them logprobs of engine and learner differ by some 1e-3."""
    router_bias_rate: float = Field(default=0.0, ge=0)
    """Step of the router's selection bias towards equal expert loads after each RL update."""
