"""ModelRunner: one batch of token rows through the model and the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import WeightsError
from engine.kvcache.paged import ROWS
from engine.light.row_check import check_row_bits
from engine.light.rows import CacheRows, Reads
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.ops import FastOps, RowOps, TiledOps, pad_rows
from engine.runtime.types import WeightSet
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
    """logits float32 [M, V]; experts int16 [N, L, K]; bad_rows bool [N], true where the hidden
    state, a logit or what is cached is NaN, infinite or too large, None when there is no such row;
    reads: what hybrid attention read, None in full attention."""

    logits: np.ndarray
    experts: np.ndarray
    bad_rows: np.ndarray | None
    reads: Reads | None


class ModelRunner:
    """Owns the parameters; called by one thread."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self._model_config = model_config
        self.model = PolicyModel(model_config).eval()
        self._ops: RowOps = TiledOps() if config.deterministic else FastOps()
        if config.deterministic:
            check_row_bits(self.model, self._ops, config.block_size, config.max_rows)
        self.weight_version = -1
        self.weight_checksum = ""

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

    def check(self, weights: WeightSet) -> None:
        """WeightsError unless the set is intact and fits this model."""
        verify_weight_set(weights)
        version = weights.manifest.version
        self._check_config(weights)
        mine, given = self.model.state_dict(), weights.tensors
        if set(mine) != set(given):
            missing, extra = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
            raise WeightsError(
                f"weight set {version} does not fit this model: missing {missing[:3]}, unknown "
                f"{extra[:3]}; expected the tensors of {self._model_config.num_hidden_layers} "
                "layers: check the model section"
            )
        for name, tensor in mine.items():
            array = given[name]
            if array.dtype != np.float32 or array.shape != tuple(tensor.shape):
                raise WeightsError(
                    f"weight set {version}: {name} is {array.dtype} {array.shape}, this model "
                    f"expects float32 {tuple(tensor.shape)}; check the model section"
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

    @torch.no_grad()
    def load(self, weights: WeightSet) -> None:
        """Take over weights that ``check`` has passed."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(torch.from_numpy(np.array(weights.tensors[name])))
        self.weight_version = weights.manifest.version
        self.weight_checksum = weights.manifest.checksum
