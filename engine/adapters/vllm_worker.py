"""What runs inside vLLM's worker process; VllmRuntime names it, vLLM imports it there.

Weights arrive as a safetensors file in shared memory, and tokens are drawn as LightEngine draws
them where a request names its draws: u = Philox(draw key, position), by inverse CDF over the
distribution that vLLM has tempered and truncated (facts/vllm-fit.md 2.1, 2.3).
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from engine.adapters.vllm_names import BACKEND, DRAW
from engine.light.draws import uniforms
from engine.runtime.types import DrawKey

# -- weights --------------------------------------------------------------------------------------


@dataclass
class FileInit:
    pass


@dataclass
class FileUpdate:
    path: str


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):
    """Tensors by hub name out of a safetensors file that this machine can map."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the base class waits for an accelerator, which a CPU is not
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        with safe_open(update_info.path, "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)


class ParlWorker:
    """Mixed into vLLM's worker (worker_extension_cls)."""

    model_runner: Any

    def parl_fix_ups(self) -> dict[str, int]:
        """What vLLM's CPU build forgets after an update: experts are not packed again (trap A), and
        a head that is tied to the embedding keeps its old copy (trap B)."""
        done = {"experts": 0, "heads": 0}
        for layer in self.model_runner.model.modules():
            method = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                experts = getattr(kernel, "fused_experts", None)
                if experts is not None:
                    experts.process_weights_after_loading(layer)
                    done["experts"] += 1
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
                done["heads"] += 1
        return done


# -- draws ----------------------------------------------------------------------------------------


@dataclass
class _Row:
    """A request in the batch: its key, prompt length, and the running list of its outputs."""

    key: DrawKey
    num_prompt: int
    output: list[int]


_due: dict[int, float] = {}
"""Row of the batch -> its uniform draw, between the logits processor and the sampler."""


class DrawProcessor(LogitsProcessor):
    """Changes no logit: it knows which request has which row, and names that row's draw."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            named = (params.extra_args or {}).get(DRAW)
            self._rows.pop(index, None)
            if named is not None:
                self._rows[index] = _Row(DrawKey(*named), len(prompt or ()), output)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        _due.clear()
        if self._rows:
            rows = list(self._rows.items())
            positions = [row.num_prompt + len(row.output) for _, row in rows]
            draws = uniforms([row.key for _, row in rows], positions)
            _due.update({index: float(u) for (index, _), u in zip(rows, draws, strict=True)})
        return logits


_sample = TopKTopPSampler.forward_cpu


def _forward(
    self: TopKTopPSampler, logits: torch.Tensor, generators: Any, k: Any, p: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's own, then rows that name a draw take the token of that draw."""
    tokens, logprobs = _sample(self, logits, generators, k, p)
    if _due:
        assert logprobs is not None, "VllmRuntime sets logprobs_mode=processed_logprobs"
        for row, u in _due.items():
            weights = np.exp(logprobs[row].double().numpy())
            cumulative = weights.cumsum()
            index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
            # the last token with weight, should rounding put the draw past the end
            tokens[row] = min(index, int(np.flatnonzero(weights)[-1]))
        _due.clear()
    return tokens, logprobs


TopKTopPSampler.forward_cpu = _forward
