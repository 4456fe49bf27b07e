"""Plain values of the Model Runtime Interface (MRI): picklable, no torch, no Ray.

Positions count tokens of one context from 0. Arrays are numpy: ids int32, logprobs float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NewType

import numpy as np

ContextId = NewType("ContextId", str)
RewarmPolicy = Literal["best_effort", "wait_complete", "timeout"]
FinishReason = Literal["stop", "length", "cancelled", "deadline"]
ConstraintKind = Literal["json_schema", "regex", "grammar", "tool_calls"]


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Names a stream of random draws: u = Philox(run_seed, round, task, sample, stream, position).

    ``position`` is the index of the drawn token in its context, so a draw never depends on worker,
    attempt or call order (house 4.7). All fields are non-negative; run_seed < 2**64,
    round and task < 2**32, sample and stream < 2**16.
    """

    run_seed: int
    round: int = 0
    task: int = 0
    sample: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """How one context is served. ``draw=None`` means greedy or engine-seeded sampling. ``kv``: auto
    takes what the engine's model runs; an engine refuses to pretend the other."""

    kv: Literal["auto", "full", "tiered"] = "auto"
    summaries: bool = False
    priority: int = 0
    rate_class: str = "default"
    deterministic: bool = False
    draw: DrawKey | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 = greedy; logprobs are always those of the distribution really sampled.

    Order: penalties, logit_bias, constraint, temperature, top_k, top_p, min_p (a token stays when
    its probability is at least min_p times that of the likeliest). presence and frequency penalties
    count the tokens sampled in this context; repetition_penalty (> 1 discourages) looks at its
    other tokens too, as vLLM does. ``seed``: draws from Philox of the seed and the position;
    ContextPolicy.draw goes before it. ``logit_bias``: (token id, amount added to its logit).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the sampled text must look like, from its first token to the stop id.

    ``text``: a JSON schema; a regular expression; a Lark grammar; or, for tool_calls, JSON
    ``{"tools": [OpenAI tools], "choice": "auto" | "required" | {"name": ...}, "style": "kimi" |
    "hermes"}``. Errors: ConstraintError when it cannot be compiled or met within max_new_tokens.
    """

    kind: ConstraintKind
    text: str


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Generate up to ``max_new_tokens`` ids, ending after the first id in ``stop_ids``.

    ``stop_texts`` are matched on the bytes of the sampled tokens; the tokens up to and with the
    match are kept. ``num_logprobs``: likeliest alternatives to report per token, at most 20.
    ``deadline_s``: seconds from the call, then finish="deadline" with what was sampled. ``debug``:
    tell where the time went (StepResult.debug); costs some more of it.
    """

    ctx: ContextId
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    constraint: Constraint | None = None
    num_logprobs: int = 0
    deadline_s: float | None = None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. The stop id, if one ended the step, is the last of ``token_ids``.

    ``experts``: int16 [n, num_moe_layers, top_k], routed experts of the n positions
    [experts_start, experts_start + n) that were computed since this context last reported (the
    prompt included, also after ``fork``). The last sampled token has not been fed yet, so
    concatenating all reports covers positions 0 .. len(context) - 2. None for dense models.

    ``selections``: int32 [n, layers, G, P | 1, K], the far tokens that these positions' queries
    read in hybrid attention (engine.attention), -1 fills; starts at ``experts_start`` too. None in
    full attention. ``warm_reads``, ``retrieved``: coded tokens in view and far tokens that were
    read, summed over the positions computed in this step, in one layer.

    ``codes``: uint8 [w, bytes], the codes of keys and values (engine.kvcache.payload) of the w
    blocks [codes_start, codes_start + w) that turned warm since this context last reported (all of
    them after ``fork``). Blocks have 32 tokens; concatenating all reports covers blocks 1, 2, ...
    None in full attention, in profile full, and with EngineConfig.report_codes off.

    ``top_ids`` int32, ``top_logprobs`` float32 [n, num_logprobs], likeliest first; -1 and -inf
    where fewer tokens could be sampled. ``masks``: uint8 [n, ceil(vocab / 8)], little bit order,
    1 = the constraint allowed the token. ``stop_text``: the one that ended the step. ``debug``:
    plain numbers and texts by name, see engine.light.debug.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish: FinishReason
    weight_version: int
    start: int
    experts: np.ndarray | None = None
    experts_start: int = 0
    selections: np.ndarray | None = None
    warm_reads: int = 0
    retrieved: int = 0
    codes: np.ndarray | None = None
    codes_start: int = 1
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    masks: np.ndarray | None = None
    stop_text: str | None = None
    debug: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepDelta:
    """The next ``m`` tokens of a streamed step: ``token_ids`` int32 [m], ``logprobs`` float32 [m],
    alternatives as in StepResult. ``weight_version``: that of the step; -1 = not told."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    weight_version: int = -1


@dataclass(frozen=True, slots=True)
class KVSummary:
    """What the engine keeps for a context: counts are tokens, bytes those of the device and of cold
    records. ``vectors``: summaries of cold blocks in order, fp32 [chunks, dimension], where the
    context's policy asks for them."""

    num_tokens: int
    num_hot: int
    num_warm: int
    num_cold: int
    kv_bytes: int
    vectors: np.ndarray | None = None
    cold_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EvictSelector:
    """Tokens [start, end) to drop; engines round outward to whole blocks. ``to`` cold: coded blocks
    among them leave the device for host memory or disk, and are not read until they are warmed
    again."""

    start: int
    end: int
    to: Literal["absent", "cold"] = "absent"


@dataclass(frozen=True, slots=True)
class EvictResult:
    """Blocks really evicted as token ranges. ``confirmed`` is the MRI 1.1 field."""

    evicted: tuple[tuple[int, int], ...]
    freed_bytes: int
    confirmed: bool = True


@dataclass(frozen=True, slots=True)
class RewarmResult:
    """Cold blocks by what became of them, as token ranges: they can be read, arrive before a later
    step, or failed their check; then the context is computed again by its next step."""

    loaded: tuple[tuple[int, int], ...]
    pending: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Identity of one policy version: sha256 per tensor over its little-endian bytes.

    ``checksum`` is the sha256 over the sorted ``name:digest`` lines and names the whole set.
    """

    version: int
    checksum: str
    tensors: dict[str, str]
    model_config: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Weights with their manifest; includes the router selection bias (a buffer)."""

    manifest: WeightManifest
    tensors: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Capabilities and state; ``weight_version`` is -1 until weights are loaded.

    ``kv_bytes_used`` is what hot and warm tiers hold on the device; ``kv_cold_bytes`` lie in host
    memory or on disk. ``kv_warm_bf16_bytes``: the warm tokens' keys and values in bf16.
    """

    engine: str
    mri_version: str
    weight_version: int
    weight_checksum: str
    max_context: int
    vocab_size: int
    capabilities: frozenset[str] = frozenset()
    num_contexts: int = 0
    kv_bytes_used: int = 0
    kv_bytes_total: int = 0
    kv_hot_bytes: int = 0
    kv_warm_bytes: int = 0
    kv_cold_bytes: int = 0
    kv_warm_bf16_bytes: int = 0
