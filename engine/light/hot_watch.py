"""HotWatch: a hot-zone controller for each context, fed by the engine's own steps.

Looks at one layer of the middle and one head of each group, at the newest row of a context that is
read sparsely. The compiled decode step gives no weights back, so they are computed again here for
what that row read: sink, window and its chosen far tokens. Shapes: A query heads, G key-value
heads, P = A / G, D key size, n tokens read, K chosen ones.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor

from engine.attention.topology import window_start
from engine.attention.view import WarmBlocks
from engine.kvcache.config import HotZoneConfig
from engine.kvcache.hot_zone import HotSignal, HotZoneController, hot_signal
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV


class HotWatch:
    """Not for deterministic engines: NotSupportedError."""

    def __init__(self, config: HotZoneConfig, kv: TieredKV, num_layers: int, window: int) -> None:
        self._config, self._kv, self._window = config, kv, window
        self.layer = num_layers // 2
        self._controllers: dict[str, HotZoneController] = {}
        self._signals: dict[str, HotSignal] = {}
        self.seconds = 0.0
        """CPU time of this thread that watching has taken."""
        self.new_controller()

    def new_controller(self) -> HotZoneController:
        config = self._kv.config
        return HotZoneController(self._config, config.hot, config.deterministic)

    def see(
        self,
        ctx: str,
        length: int,
        scaled: Tensor,
        parts: tuple[Tensor, Tensor, Tensor, Tensor],
        warm: WarmBlocks | None,
        selected: Tensor,
    ) -> None:
        """scaled [A, D]; parts: sink and hot keys and values [G, n, ...]; selected int32
        [G, P | 1, K], positions, -1 fills."""
        begin = time.thread_time()
        sink_k, _, hot_k, _ = parts
        q = scaled.unflatten(0, (hot_k.shape[0], -1))[:, :1]
        start = length - hot_k.shape[1]
        first = window_start(length, self._window)
        chosen = selected[:, 0].long()
        keys = _chosen_keys(chosen, hot_k, start, warm)
        parts_k = (sink_k, keys, hot_k[:, first - start :])
        logits = torch.cat([torch.matmul(q, k.float().transpose(1, 2))[:, 0] for k in parts_k], 1)
        ends = [torch.arange(sink_k.shape[1]), torch.arange(first, length)]
        rows = [x.expand(len(chosen), -1) for x in ends]
        positions = torch.cat([rows[0], chosen, rows[1]], 1)
        weights = logits.masked_fill_(positions < 0, -torch.inf).softmax(dim=1)
        hot = self.hot_of(ctx)
        self._signals[ctx] = hot_signal(weights, length, hot, positions, self._config.step)
        self.seconds += time.thread_time() - begin

    def finish(self) -> None:
        """Between two steps: zones become what their controllers say."""
        begin = time.thread_time()
        for ctx, signal in self._signals.items():
            controller = self._controllers.get(ctx)
            if controller is None:
                controller = self._controllers[ctx] = self.new_controller()
            before = controller.hot
            more = controller.observe(signal) - before
            if more > 0 and (
                before < controller.start or 2 * more // BLOCK > self._kv.device.full.slots.num_free
            ):
                # a zone that grows must not be why a step finds no room; one that an alarm has
                # shrunk stays
                controller.hot = before
            elif more:
                self._kv.set_hot(ctx, controller.hot)
        self._signals.clear()
        self.seconds += time.thread_time() - begin

    def fork(self, parent: str, child: str) -> None:
        """The child's controller goes on where its parent's is."""
        controller = self._controllers.get(parent)
        if controller is not None:
            self._controllers[child] = copy.deepcopy(controller)

    def forget(self, ctx: str) -> None:
        self._controllers.pop(ctx, None)

    def shrunk(self, ctx: str, hot: int) -> None:
        """Its zone was made shorter by somebody else."""
        controller = self._controllers.get(ctx)
        if controller is None:
            controller = self._controllers[ctx] = self.new_controller()
        controller.hot = hot

    def hot_of(self, ctx: str) -> int:
        controller = self._controllers.get(ctx)
        return self._kv.config.hot if controller is None else controller.hot


def _chosen_keys(chosen: Tensor, hot_k: Tensor, start: int, warm: WarmBlocks | None) -> Tensor:
    """Keys [G, K, D] at chosen positions int64 [G, K]; anything where a position is -1."""
    groups = torch.arange(len(chosen))[:, None]
    if not hot_k.shape[1]:
        assert warm is not None, "far tokens are hot or warm"
        return _warm_keys(chosen, warm)
    hot = hot_k[groups, (chosen - start).clamp(min=0)].float()
    if warm is None:
        return hot
    return torch.where((chosen >= start)[..., None], hot, _warm_keys(chosen, warm))


def _warm_keys(chosen: Tensor, warm: WarmBlocks) -> Tensor:
    place = torch.searchsorted(warm.blocks, chosen // BLOCK).clamp(max=len(warm) - 1)
    return warm.key_rows((place * BLOCK + chosen.clamp(min=0) % BLOCK)[None])[0]
