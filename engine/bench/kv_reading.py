"""Teacher-forced tokens that read a modified KV cache of a real context.

A perplexity over one pass never reads the cache, so every scheme looks perfect in it
(facts/kv-attention.md 1.2). Here a context is prefilled with full attention and its keys and values
are kept in fp32; then more tokens are run through the model, every one of which reads the context
as a variant of the cache would give it back.

Shapes: T context tokens, n tokens that read, G key-value heads, A query heads, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.sequence import attend_sequence
from engine.attention.summary import Summaries
from engine.bench.kv_texts import DIGITS, Question
from engine.kvcache.quantise import Profile
from engine.model.model import PolicyModel

NO_LIMIT = 1 << 40
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """How the cache is read. ``hot``: newest tokens in full precision. ``warm``: coded tokens on
    the device before those, older ones are cold and unseen; None keeps all."""

    name: str
    profile: Profile
    config: HybridConfig
    hot: int
    warm: int | None = None


FULL = Variant("full", "full", HybridConfig(dense_below=NO_LIMIT), hot=1024)


def coded(profile: Profile, hot: int, warm: int | None = None) -> Variant:
    """Full attention over warm codes."""
    config = HybridConfig(window=min(hot, 1024), dense_below=NO_LIMIT)
    return Variant(profile, profile, config, hot, warm)


def hybrid(name: str, config: HybridConfig, profile: Profile = "k8v8") -> Variant:
    """Everything outside the window is warm, at every length."""
    return Variant(name, profile, config.model_copy(update={"dense_below": 0}), config.window)


SummariseLayer = Callable[[int, Summaries], Summaries]
"""Trained summaries: (layer, means of its blocks) -> what stands for them."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """keys: for each layer fp32 [T, G, D]; values [T, G, V] or None for latent attention."""

    token_ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor | None, ...]


@torch.no_grad()
def prefill(
    model: PolicyModel,
    token_ids: Sequence[int],
    chunk: int = 512,
    parts: int = 1,
    *,
    queries: list[list[Tensor]] | None = None,
    hidden: list[Tensor] | None = None,
) -> Prefill:
    """Full attention over the context, ``chunk`` tokens at a time. ``parts`` > 1: in so many equal
    parts that do not see each other, as if each were prefilled alone at its positions. ``queries``
    takes each chunk's list of the layers' [c, A, D], ``hidden`` its rows [c, H]."""
    config = model.config
    num_layers, total = config.num_hidden_layers, len(token_ids)
    heads = config.cached_heads
    keys = [torch.empty(total, heads, config.cached_key_dim) for _ in range(num_layers)]
    size = config.cached_value_dim
    values = [None if config.is_mla else torch.empty(total, heads, size) for _ in range(num_layers)]
    ids = torch.tensor(token_ids)
    part = torch.arange(total) * parts // total
    for start in range(0, total, chunk):
        end = min(start + chunk, total)
        seen = torch.arange(end) <= torch.arange(start, end)[:, None]
        seen &= part[:end] == part[start:end, None]
        asked: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            asked.append(q)  # noqa: B023 - called in this turn
            here, stored = slice(start, end), values[layer]  # noqa: B023 - called in this turn
            keys[layer][here] = k
            if stored is not None:
                stored[here] = v
            all_k = keys[layer][:end]  # noqa: B023
            all_v = all_k[..., :size] if stored is None else stored[:end]  # noqa: B023
            repeats = q.shape[1] // heads
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                all_k.transpose(0, 1).repeat_interleave(repeats, 0)[None],
                all_v.transpose(0, 1).repeat_interleave(repeats, 0)[None],
                attn_mask=seen,  # noqa: B023
            )
            return out[0].transpose(0, 1)

        rows, _ = model(ids[start:end], torch.arange(start, end), attend, absorbed=config.is_mla)
        if queries is not None:
            queries.append(asked)
        if hidden is not None:
            hidden.append(rows)
    return Prefill(tuple(token_ids), tuple(keys), tuple(values))


@torch.no_grad()
def read(
    model: PolicyModel,
    context: Prefill,
    token_ids: Sequence[int],
    variant: Variant,
    *,
    queries: list[Tensor] | None = None,
    keys: list[Tensor] | None = None,
    summarise: SummariseLayer | None = None,
) -> Tensor:
    """Hidden rows [n, H] of ``token_ids``, which follow the context and read it and each other as
    ``variant`` says. ``queries`` and ``keys`` take each layer's [n, A, D] and [n, G, D]."""
    start = len(context.token_ids)
    is_mla = model.config.is_mla
    value_dim = model.config.cached_value_dim if is_mla else None

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_v = context.values[layer]
        if queries is not None:
            queries.append(q)
        if keys is not None:
            keys.append(k)
        done = attend_sequence(
            q,
            torch.cat([context.keys[layer], k]),
            None if old_v is None else torch.cat([old_v, v]),
            variant.config,
            variant.hot,
            variant.profile,
            value_dim=value_dim,
            warm=variant.warm,
            summarise=None if summarise is None else partial(summarise, layer),
        )
        return done.out

    positions = torch.arange(start, start + len(token_ids))
    hidden, _ = model(torch.tensor(token_ids), positions, attend, absorbed=is_mla)
    return hidden


def cached_prefill(
    model: PolicyModel, model_digest: str, token_ids: Sequence[int], folder: Path
) -> Prefill:
    """``prefill``, or its file in ``folder`` where an earlier run left one (for SmolLM2-135M 46 KB
    a token)."""
    ids = torch.tensor(token_ids)
    key = hashlib.sha256(f"{FORMAT} {model_digest} ".encode() + ids.numpy().tobytes()).hexdigest()
    file = folder / f"prefill-{key[:24]}.safetensors"
    num_layers = model.config.num_hidden_layers
    if file.exists():
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            keys = tuple(stored.get_tensor(f"k{i}") for i in range(num_layers))
            values = tuple(
                stored.get_tensor(f"v{i}") if f"v{i}" in names else None for i in range(num_layers)
            )
        return Prefill(tuple(token_ids), keys, values)
    made = prefill(model, token_ids)
    tensors = {f"k{i}": k for i, k in enumerate(made.keys)}
    tensors |= {f"v{i}": v for i, v in enumerate(made.values) if v is not None}
    folder.mkdir(parents=True, exist_ok=True)
    # a run that is stopped while it writes must not leave half a file under the name
    part = file.with_suffix(f".{os.getpid()}")
    save_file(tensors, part)
    part.replace(file)
    return made


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of next-token distributions from those of full attention, means over tokens.

    kl: nats, from full to the variant. dlogp: |difference| of the log-probability of the token that
    follows. agreement: share of tokens with the same most likely next one."""

    kl: float
    dlogp: float
    agreement: float


@torch.no_grad()
def deviation(model: PolicyModel, full: Tensor, hidden: Tensor, following: Tensor) -> Deviation:
    """full, hidden [n, H]; following int64 [n]."""
    kl = dlogp = same = 0.0
    for rows in torch.arange(len(hidden)).split(64):
        right = model.logits(full[rows]).double().log_softmax(-1)
        ours = model.logits(hidden[rows]).double().log_softmax(-1)
        kl += float((right.exp() * (right - ours)).sum())
        at = following[rows][:, None]
        dlogp += float((right.gather(1, at) - ours.gather(1, at)).abs().sum())
        same += float((right.argmax(-1) == ours.argmax(-1)).sum())
    num = len(hidden)
    return Deviation(kl / num, dlogp / num, same / num)


@dataclass(frozen=True, slots=True)
class Needles:
    """nll: nats a digit. accuracy: share of digits that are the most likely next token. numbers:
    how many are right in all digits. by_question: (token where its needle begins, nll, digits
    right)."""

    nll: float
    accuracy: float
    numbers: int
    by_question: tuple[tuple[int, float, int], ...]


@torch.no_grad()
def score_needles(
    model: PolicyModel, context: Prefill, questions: Sequence[Question], variant: Variant
) -> Needles:
    """The label's digits are teacher-forced, each question follows the context alone."""
    nlls: list[float] = []
    right: list[int] = []
    for question in questions:
        hidden = read(model, context, question.ids[:-1], variant)[-DIGITS:]
        logprobs = model.logits(hidden).double().log_softmax(-1)
        label = torch.tensor(question.ids[-DIGITS:])
        nlls.append(-float(logprobs.gather(1, label[:, None]).mean()))
        right.append(int((logprobs.argmax(-1) == label).sum()))
    return Needles(
        nll=sum(nlls) / len(nlls),
        accuracy=sum(right) / (DIGITS * len(right)),
        numbers=sum(r == DIGITS for r in right),
        by_question=tuple(zip((q.position for q in questions), nlls, right, strict=True)),
    )
