"""ModelRunner: one batch of token rows through the model and the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import WeightsError
from engine.kvcache.paged import ROWS, AttentionPlan, PagedKV
from engine.light.row_check import check_row_bits
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.ops import FastOps, RowOps, TiledOps, pad_rows
from engine.runtime.types import WeightSet
from engine.runtime.weights import verify_weight_set


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows in any order: token ids and positions int64 [N], block tables int64 [N, J] and the rows
    whose logits are wanted int64 [M]."""

    token_ids: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    sampled_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """logits float32 [M, V]; experts int16 [N, L, K]; bad_rows bool [N], true where the hidden
    state or a logit is NaN or infinite, None when there is no such row."""

    logits: np.ndarray
    experts: np.ndarray
    bad_rows: np.ndarray | None


class ModelRunner:
    """Owns parameters and KV storage; called by one thread."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self._model_config = model_config
        self.model = PolicyModel(model_config).eval()
        self.kv = PagedKV(
            model_config.num_hidden_layers,
            config.num_blocks,
            config.block_size,
            model_config.cached_heads,
            model_config.cached_key_dim,
            model_config.cached_value_dim,
        )
        self._ops: RowOps = TiledOps() if config.deterministic else FastOps()
        if config.deterministic:
            check_row_bits(self.model, self._ops, config.block_size, config.max_rows)
        self._block_size = config.block_size
        self.weight_version = -1
        self.weight_checksum = ""

    @torch.inference_mode()
    def run(self, batch: RowBatch) -> BatchOutput:
        n = len(batch.token_ids)
        # rows of the longest contexts first (AttentionPlan); padding rows come last and read block
        # 0, which nobody owns or writes: a NaN there would reach every row that reads past its end
        order = np.argsort(-(batch.positions // self._block_size), kind="stable")
        padding = -n % ROWS
        positions = np.pad(batch.positions[order], (0, padding))
        tables = np.pad(batch.tables[order], ((0, padding), (0, 0)))
        ids = np.pad(batch.token_ids[order], (0, padding))
        plan = AttentionPlan.of(tables, positions, self._block_size)
        blocks = torch.from_numpy(tables[np.arange(n), positions[:n] // self._block_size])
        offsets = torch.from_numpy(positions[:n] % self._block_size)
        slots = self.kv.slots(blocks, offsets)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv.write(layer, slots, k[:n], v[:n])
            return self.kv.attend(layer, q, plan)

        hidden, experts = self.model(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            attend,
            ops=self._ops,
            absorbed=True,
        )
        place = torch.from_numpy(np.argsort(order, kind="stable"))
        finite = torch.isfinite(hidden[place]).all(dim=1).numpy()
        wanted = place[torch.from_numpy(batch.sampled_rows)]
        rows = pad_rows(hidden[wanted], ROWS)
        logits = self.model.logits(rows, self._ops)[: len(wanted)].numpy()
        finite[batch.sampled_rows] &= np.isfinite(logits).all(axis=1)
        return BatchOutput(
            logits,
            experts[place].to(torch.int16).numpy(),
            None if finite.all() else ~finite,
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
