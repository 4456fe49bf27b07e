"""One engine of the decode bench in a process of its own: a JSON line in, a JSON line out.

Started as ``python -P decode_peers.py ENGINE MODEL THREADS`` by engine.bench.decode, also by the
interpreter of another environment (vllm, llama.cpp): only the standard library at the top. Asked
``{"prompts": [[ids]], "new": n}`` it answers with wall and CPU seconds of sampling n tokens after
each prompt, temperature 1, all together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol

MAX_CONTEXT, MAX_BATCH = 512, 16


class Engine(Protocol):
    version: str

    def run(self, prompts: list[list[int]], new: int) -> int:
        """How many tokens were sampled."""
        ...


class Ours:
    """LightEngine with the native step: bfloat16, int8, int4 or float32 weights."""

    def __init__(self, model: str, threads: int, weights: str) -> None:
        import asyncio
        from pathlib import Path

        from engine.config import EngineConfig
        from engine.light.engine import LightEngine
        from engine.model.checkpoint.load import load_model
        from engine.runtime.weights import make_weight_set

        policy = load_model(Path(model))
        self._config = policy.config
        self._tensors = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
        self._engine_config = EngineConfig(
            deterministic=False,
            compute="fast",
            weights=weights,  # pyright: ignore[reportArgumentType]
            kv_dtype="float32" if weights == "float32" else "bfloat16",
            num_threads=threads,
            max_context=MAX_CONTEXT,
            max_contexts=MAX_BATCH,
            num_blocks=MAX_BATCH * MAX_CONTEXT // 32,
        )
        weight_set = make_weight_set(1, self._tensors, {})
        self._engine = LightEngine(
            self._config, self._engine_config, fetch_weights=lambda version: weight_set
        )
        self._loop = asyncio.Runner()
        self.version = f"parl {weights}"

    def run(self, prompts: list[list[int]], new: int) -> int:
        return self._loop.run(self._sample(prompts, new))

    async def _sample(self, prompts: list[list[int]], new: int) -> int:
        import asyncio

        from engine.runtime.types import ContextPolicy, StepRequest

        engine = self._engine
        contexts = [await engine.init_context(prompt, ContextPolicy()) for prompt in prompts]
        steps = [engine.forward_step(StepRequest(ctx, new)) for ctx in contexts]
        results = await asyncio.gather(*steps)
        for ctx in contexts:
            await engine.release(ctx)
        return sum(len(result.token_ids) for result in results)

    def profile(self, batch: int, length: int, steps: int) -> dict[str, Any]:
        """The native step alone, ``batch`` rows at ``length`` tokens: least milliseconds of a step
        and of its parts, and the bandwidth of reading the weights between the steps."""
        import numpy as np
        import torch

        from engine.kvcache.paged import PagedKV
        from engine.light.native import NativeModel

        model = NativeModel(self._config, self._engine_config)
        model.load(self._tensors)
        width = -(-(length + 1) // 32)
        kv = PagedKV(
            self._config.num_hidden_layers,
            batch * width,
            32,
            self._config.num_key_value_heads,
            self._config.head_dim,
            dtype=getattr(torch, self._engine_config.kv_dtype),
        )
        tables = np.arange(1, 1 + batch * width).reshape(batch, width)
        ids, where, rows = np.arange(batch), np.full(batch, length), np.arange(batch)
        wall, parts, gigabytes = [], [], []
        for _ in range(steps):
            begin = time.perf_counter()
            model.step(ids, where, tables, kv, rows)
            wall.append(time.perf_counter() - begin)
            parts.append(model.take_seconds())
            gigabytes.append(model.read_bandwidth())
        return {
            "step_ms": 1e3 * min(wall),
            "parts_ms": {name: 1e3 * min(part[name] for part in parts) for name in parts[0]},
            "gigabytes_s": max(gigabytes),
            "weight_bytes": model.weight_bytes,
        }


class Transformers:
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        # transformers' own stubs disagree about generate
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        ).eval()
        self.version = f"transformers {transformers.__version__} {dtype}"

    def run(self, prompts: list[list[int]], new: int) -> int:
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return int(out[:, ids.shape[1] :].numel())


class Vllm:
    """In this process: its engine process would poll on a core of its own."""

    def __init__(self, model: str, threads: int, eager: bool) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        import vllm  # pyright: ignore[reportMissingImports] - in an environment of its own

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_CONTEXT,
            max_num_seqs=MAX_BATCH,
            enable_prefix_caching=False,
            enforce_eager=eager,
        )
        self.version = f"vllm {vllm.__version__} bfloat16 {'eager' if eager else 'compiled'}"

    def run(self, prompts: list[list[int]], new: int) -> int:
        params = self._vllm.SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(asked, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


class LlamaCpp:
    """The C interface, sampling in C too."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp as c  # pyright: ignore[reportMissingImports] - as vLLM

        self._c = c
        c.llama_backend_init()
        # a callback that is collected would be called all the same
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, None)
        self._model = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
        settings = c.llama_context_default_params()
        settings.n_ctx = MAX_BATCH * MAX_CONTEXT
        settings.n_batch = settings.n_ubatch = 2048
        settings.n_seq_max = MAX_BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = c.llama_init_from_model(self._model, settings)
        self._sampler = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        c.llama_sampler_chain_add(self._sampler, c.llama_sampler_init_dist(1))
        self._batch = c.llama_batch_init(2048, 0, 1)
        self.version = f"llama.cpp (llama-cpp-python {c.__version__})"

    def run(self, prompts: list[list[int]], new: int) -> int:
        c, batch = self._c, self._batch
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        rows = [
            (token, place, seq, place == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        lengths = [len(prompt) for prompt in prompts]
        for step in range(new):
            batch.n_tokens = len(rows)
            for i, (token, place, seq, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            if c.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode failed on {len(rows)} rows")
            places = [i for i, row in enumerate(rows) if row[3]]
            tokens = [c.llama_sampler_sample(self._sampler, self._context, i) for i in places]
            rows = [(token, lengths[seq] + step, seq, True) for seq, token in enumerate(tokens)]
        return len(prompts) * new


def start(engine: str, model: str, threads: int) -> Engine:
    """``engine``: kind-variant, for example ours-int4, transformers-bfloat16, vllm-eager, llama."""
    kind, _, variant = engine.partition("-")
    if kind == "ours":
        return Ours(model, threads, variant)
    if kind == "transformers":
        return Transformers(model, threads, variant)
    if kind == "vllm":
        return Vllm(model, threads, variant == "eager")
    if kind == "llama":
        return LlamaCpp(model, threads)
    raise ValueError(f"engine {engine!r}: expected ours-*, transformers-*, vllm-* or llama")


def main() -> None:
    engine_name, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # libraries print to stdout; the answers go to what stdout was
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = start(engine_name, model, threads)
    answers.write(json.dumps({"version": engine.version}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if "profile" in asked:
            assert isinstance(engine, Ours), "only ours has parts"
            answers.write(json.dumps(engine.profile(**asked["profile"])) + "\n")
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = engine.run(asked["prompts"], asked["new"])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        answers.write(json.dumps({"wall": wall, "cpu": cpu, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
