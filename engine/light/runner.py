"""Runners: one batch of token rows through model and cache, by torch or by the native step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import WeightsError
from engine.kernels.dispatch import runs_triton
from engine.kvcache.paged import ROWS
from engine.light.paged_rows import PagedRows
from engine.light.row_check import check_row_bits
from engine.light.rows import CacheRows, Reads
from engine.light.sampler import Drawn, RowRules, draw, is_plain
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.ops import FastOps, RowOps, TiledOps, pad_rows
from engine.runtime.types import Sampling, WeightSet
from engine.runtime.weights import verify_weight_set


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Token ids and positions int64 [N], their place in the cache, and the rows whose logits are
    wanted int64 [M]."""

    token_ids: np.ndarray
    positions: np.ndarray
    cache: CacheRows
    sampled_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """logits float32 [M, V], valid until the next batch; experts int16 [N, L, K]; bad_rows bool
    [N], true where the hidden state, a logit or what is cached is NaN, infinite or too large, None
    when there is no such row; reads: what hybrid attention read, None in full attention."""

    logits: np.ndarray
    experts: np.ndarray
    bad_rows: np.ndarray | None
    reads: Reads | None


class Runner(ABC):
    """Owns the parameters; called by one thread."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._model_config = model_config
        self.weight_version = -1
        self.weight_checksum = ""

    @abstractmethod
    def run(self, batch: RowBatch) -> BatchOutput: ...

    def draw(
        self,
        logits: np.ndarray,
        uniforms: np.ndarray,
        params: Sequence[Sampling],
        rules: Sequence[RowRules | None],
    ) -> Drawn:
        """engine.light.sampler.draw."""
        return draw(logits, uniforms, params, rules)

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What a weight set must hold: names as in PolicyModel's state_dict."""

    @abstractmethod
    def _take(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Copy the tensors of a set that ``check`` has passed."""

    def check(self, weights: WeightSet) -> None:
        """WeightsError unless the set is intact and fits this model."""
        verify_weight_set(weights)
        version = weights.manifest.version
        self._check_config(weights)
        mine, given = self.shapes, weights.tensors
        if set(mine) != set(given):
            missing, extra = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
            raise WeightsError(
                f"weight set {version} does not fit this model: missing {missing[:3]}, unknown "
                f"{extra[:3]}; expected the tensors of {self._model_config.num_hidden_layers} "
                "layers: check the model section"
            )
        for name, shape in mine.items():
            array = given[name]
            if array.dtype != np.float32 or array.shape != shape:
                raise WeightsError(
                    f"weight set {version}: {name} is {array.dtype} {array.shape}, this model "
                    f"expects float32 {shape}; check the model section"
                )
            if not np.isfinite(array).all():
                raise WeightsError(
                    f"weight set {version}: {name} holds NaN or infinity; the learner diverged: "
                    "resume from an older checkpoint"
                )

    def _check_config(self, weights: WeightSet) -> None:
        """Equal shapes may hide another model (rope_theta, eps): compare the manifest's fields."""
        mine = self._model_config.model_dump(mode="json")
        for name, value in weights.manifest.model_config.items():
            if name not in mine or mine[name] != value:
                raise WeightsError(
                    f"weight set {weights.manifest.version} was made with model.{name}={value}, "
                    f"this engine has {mine.get(name)}; start both with the same model section"
                )

    def load(self, weights: WeightSet) -> None:
        """Take over weights that ``check`` has passed."""
        self._take(weights.tensors)
        self.weight_version = weights.manifest.version
        self.weight_checksum = weights.manifest.checksum


class ModelRunner(Runner):
    """Torch, op by op."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        super().__init__(model_config)
        self.model = PolicyModel(model_config).eval()
        self._ops = _row_ops(config, self.model.norm.weight)
        if config.deterministic:
            check_row_bits(self.model, self._ops, config.block_size, config.max_rows)

    @torch.inference_mode()
    def run(self, batch: RowBatch) -> BatchOutput:
        order = batch.cache.order
        padding = -len(order) % ROWS
        hidden, experts = self.model(
            torch.from_numpy(np.pad(batch.token_ids[order], (0, padding))),
            torch.from_numpy(np.pad(batch.positions[order], (0, padding))),
            batch.cache.attend,
            ops=self._ops,
            absorbed=True,
        )
        reads = batch.cache.finish()
        place = torch.from_numpy(np.argsort(order, kind="stable"))
        finite = torch.isfinite(hidden[place]).all(dim=1).numpy()
        wanted = place[torch.from_numpy(batch.sampled_rows)]
        rows = pad_rows(hidden[wanted], ROWS)
        logits = self.model.logits(rows, self._ops)[: len(wanted)].numpy()
        finite[batch.sampled_rows] &= np.isfinite(logits).all(axis=1)
        if reads is not None:
            finite &= ~reads.failed
        return BatchOutput(
            logits,
            experts[place].to(torch.int16).numpy(),
            None if finite.all() else ~finite,
            reads,
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _shapes(self.model)

    @torch.no_grad()
    def _take(self, tensors: Mapping[str, np.ndarray]) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(torch.from_numpy(np.array(tensors[name])))


class NativeRunner(Runner):
    """The native step of engine.light.native over the paged cache; dense models only."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        from engine.light.native import NativeModel

        super().__init__(model_config)
        with torch.device("meta"):
            self._expected = _shapes(PolicyModel(model_config, seed=None))
        self.native = NativeModel(model_config, config)

    def run(self, batch: RowBatch) -> BatchOutput:
        cache = batch.cache
        assert isinstance(cache, PagedRows), "full attention has a paged cache"
        logits, bad = self.native.step(
            batch.token_ids, batch.positions, cache.tables, cache.kv, batch.sampled_rows
        )
        experts = np.zeros((len(bad), 0, self._model_config.num_experts_per_tok), np.int16)
        return BatchOutput(logits, experts, bad if bad.any() else None, None)

    def draw(
        self,
        logits: np.ndarray,
        uniforms: np.ndarray,
        params: Sequence[Sampling],
        rules: Sequence[RowRules | None],
    ) -> Drawn:
        """Natively where no row has more than a temperature: numpy takes a millisecond for 49,152
        tokens, half a step of 4-bit weights."""
        if not all(map(is_plain, params, rules)):
            return draw(logits, uniforms, params, rules)
        temperatures = np.array([p.temperature for p in params])
        ids, logprobs = self.native.draw(logits, uniforms, temperatures)
        return Drawn(ids, logprobs, [None] * len(ids))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._expected

    def _take(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.native.load(tensors)


def new_runner(model_config: ModelConfig, config: EngineConfig) -> Runner:
    """What ``config.compute`` asks for, see ``settled``."""
    if config.compute == "fast":
        return NativeRunner(model_config, config)
    return ModelRunner(model_config, config)


def settled(model_config: ModelConfig, config: EngineConfig) -> EngineConfig:
    """``config`` with "auto" decided. NotSupportedError when "fast" cannot be had here."""
    if config.compute == "exact":
        return config
    from engine.light.native import settle

    return settle(model_config, config)


def _shapes(model: PolicyModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _row_ops(config: EngineConfig, weight: torch.Tensor) -> RowOps:
    """NotSupportedError when kernels are asked for and cannot run where ``weight`` lies."""
    ops: RowOps = TiledOps() if config.deterministic else FastOps()
    if not runs_triton(config.kernels, weight):
        return ops
    from engine.kernels.serving import KernelOps

    return KernelOps(ops)
