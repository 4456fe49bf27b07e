"""A real LightEngine decodes through the kernels, and what it cannot do it says at start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import NotSupportedError
from tests.engine.tiny import ENGINE, HYBRID, make_engine

CACHE = {"kv_append", "kv_quantise_keys", "code_scan", "topk_select", "gathered_scores"}
EXPERTS = {"moe_route", "moe_up", "moe_down", "moe_combine"}
DECODE = {
    "gqa": {"kv_quantise_values", "decode_attn_tiered", "gathered_attn", "lse_merge"},
    "mla": {"decode_attn_latent", "gathered_attn_latent", "lse_merge"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_decode_step_goes_through_every_kernel(kind: str):
    """One row; the logits of both sampled tokens are those of the torch path. Both add
    in other orders: what torch's own two ways differ by, twice, or 16 roundings of fp32 (1e-6)."""
    done = subprocess.run(
        # numpy warns where a GPU gives infinity in silence
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", _SCRIPT, kind],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    # above it stands what the engine logged
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["launches"]) == CACHE | EXPERTS | DECODE[kind]
    assert found["same_selections"] and found["retrieved"] > 0
    assert found["ours"] <= max(2 * found["torch"], 16 * 2.0**-24 * found["largest"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_on_a_cpu_are_refused_in_one_line():
    """This process does not interpret."""
    with pytest.raises(NotSupportedError, match="asked for on a cpu tensor") as caught:
        make_engine(ENGINE.model_copy(update={"kernels": "triton"}), HYBRID)
    assert "\n" not in str(caught.value)


_SCRIPT = "tests.engine.kernels.engine_step"
