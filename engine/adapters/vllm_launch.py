"""How VllmRuntime starts vLLM, and hands it a file of weights."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from engine.adapters.hub_weights import hub_tensors
from engine.adapters.vllm_names import BACKEND
from engine.errors import NotSupportedError
from engine.runtime.types import WeightSet

_READY_S = 1800
"""vLLM gives its process 600 s, less than its imports take on a machine that others use."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How the engine is started. ``kv_space_gib``: for the KV cache; ``fix_ups=False`` leaves the
    repair of the CPU build's traps out, for tests that show them."""

    max_context: int = 2048
    max_contexts: int = 256
    dtype: str = "float32"
    kv_space_gib: int = 1
    eager: bool = True
    threads: int = 2
    fix_ups: bool = True


def start_vllm(folder: Path, options: VllmOptions, mla: bool) -> Any:
    """An AsyncLLM of the hub folder. ``mla``: the model has latent attention."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(_READY_S),
        "OMP_NUM_THREADS": str(options.threads),
        # vLLM gives a CPU the executor of one process only with this at 0; its engine still has
        # a process of its own, but no second one below it that imports everything again
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if options.eager:
        # also the sampler's helpers, which a C++ compiler otherwise builds at the first step,
        # again for every new shape: minutes on a busy machine
        variables["TORCHDYNAMO_DISABLE"] = "1"
    module = "engine.adapters.vllm_worker"
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": options.dtype,
        "enforce_eager": options.eager,
        "max_model_len": options.max_context,
        "max_num_batched_tokens": max(2048, options.max_context),
        "max_num_seqs": 64,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 20,
        # the CPU's MLA has neither
        "enable_prefix_caching": not mla,
        "async_scheduling": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{module}.ParlWorker",
        "logits_processors": [f"{module}:DrawProcessor"],
        # trap C: the CPU's rotary kernel mishandles MLA's queries
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
        "disable_log_stats": True,
    }
    if mla:
        arguments["enable_chunked_prefill"] = False
    with _environment(variables):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def check_version() -> None:
    """NotSupportedError without a vLLM that this adapter is written for."""
    found = ""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
            break
        except PackageNotFoundError:
            continue
    if not found:
        raise NotSupportedError(
            "vLLM is not installed here; scripts/engine-venvs.sh makes an environment for it"
        )
    if tuple(int(part) for part in found.split(".")[:2]) not in ((0, 32), (0, 33)):
        raise NotSupportedError(f"vLLM {found}; this adapter is written for 0.32 and 0.33")


def write_shared(weights: WeightSet) -> Path:
    """A safetensors file in memory that vLLM's worker maps."""
    from safetensors.numpy import save_file

    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"parl-weights-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    save_file({name: np.asarray(t, order="C") for name, t in hub_tensors(weights)}, path)
    return path


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set while vLLM's process starts, which inherits them; this one keeps its own."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
