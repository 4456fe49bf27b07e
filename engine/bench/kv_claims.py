"""Claims about attention and codes that need a measurement of their own; see docs/claims.md.

``python -m engine.bench.kv_claims``, after or before engine.bench.kv_quality, whose files it
shares. On SmolLM2-135M and real text: where attention lies, how its entropy moves, what a
correction vector at block boundaries brings (``--smoothing``, engine.kvcache.smoothing), and what
prefilling in independent parts costs.

Shapes: n queries, G key-value heads, P query heads for each, D size, T tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.index import exact_scores
from engine.attention.select import top_positions
from engine.bench.kv_quality import cache_folder
from engine.bench.kv_reading import FULL, Prefill, cached_prefill, deviation, prefill, read
from engine.bench.kv_texts import TEXTS, smollm2, token_ids
from engine.chat.load import load_tokenizer
from engine.errors import EngineError
from engine.kvcache.quantise import BLOCK, Profile, fake_quantise_keys, fake_quantise_values
from engine.kvcache.smoothing import correction, smoothed
from engine.model.checkpoint.load import load_model
from engine.model.model import PolicyModel

LAST = (512, 1024, 2048, 4096)
TOP = 64


@torch.no_grad()
def attention_weights(
    model: PolicyModel, context: Prefill, follow: Sequence[int]
) -> Iterator[Tensor]:
    """Softmax weights [n, G, P, T] of full attention, layer by layer."""
    queries: list[Tensor] = []
    new_keys: list[Tensor] = []
    read(model, context, follow, FULL, queries=queries, keys=new_keys)
    for old, q, new in zip(context.keys, queries, new_keys, strict=True):
        k = torch.cat([old, new])
        scaled = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))
        logits = exact_scores(scaled, k.transpose(0, 1))
        lengths = torch.arange(len(old), len(k)) + 1
        hidden = torch.arange(len(k)) >= lengths[:, None]
        yield logits.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)


def attention_report(layers: Iterator[Tensor]) -> Iterator[str]:
    """Means over layers, heads and queries unless said."""
    sums: dict[str, float] = {}
    entropies: list[Tensor] = []
    for weights in layers:
        total = weights.shape[-1]
        ends = torch.arange(total - len(weights), total) + 1
        # 0 for the query itself
        age = ends[:, None] - 1 - torch.arange(total)
        found = {"first 4 tokens": weights[..., :4], f"sink, first {BLOCK}": weights[..., :BLOCK]}
        for last in LAST:
            recent = (age < last) & (torch.arange(total) >= BLOCK)
            found[f"last {last} without the sink"] = weights * recent[:, None, None]
        best = weights.topk(TOP, dim=-1).values
        blocks = torch.nn.functional.pad(weights, (0, -total % BLOCK))
        blocks = blocks.unflatten(-1, (-1, BLOCK)).sum(-1)
        found[f"best {TOP} tokens of each head"] = best
        places = top_positions(blocks, TOP)
        found[f"best {TOP} blocks of {BLOCK} of each head"] = blocks.gather(-1, places)
        for name, part in found.items():
            sums[name] = sums.get(name, 0.0) + float(part.sum(-1).mean())
        entropy = torch.special.entr(weights).sum(-1) / ends.float().log()[:, None, None]
        entropies.append(entropy.mean(dim=(1, 2)))
    num = len(entropies)
    yield "share of attention in"
    for name, value in sums.items():
        yield f"  {name:<36}{value / num:>7.1%}"
    by_layer = torch.stack(entropies)
    each = by_layer.mean(dim=1)
    moving = by_layer.mean(dim=0).unfold(0, 10, 1).mean(dim=1)
    yield (
        f"normalised entropy: mean {float(each.mean()):.3f}, layers {float(each.min()):.3f} to "
        f"{float(each.max()):.3f}; moving mean over 10 steps {float(moving.min()):.3f} to "
        f"{float(moving.max()):.3f}"
    )
    fires = int(((moving < 0.3) | (moving > 0.7)).sum())
    yield f"steps whose moving mean is below 0.3 or above 0.7: {fires} of {len(moving)}"


def coded_context(context: Prefill, profile: Profile, correct: bool) -> tuple[Prefill, float]:
    """The context as its codes give it back, sink and last partial block aside, with the boundary
    correction or without; and the relative RMS error of the coded keys."""
    error = power = 0.0
    keys: list[Tensor] = []
    values: list[Tensor | None] = []
    for k, v in zip(context.keys, context.values, strict=True):
        coded_k = _coded(k, profile, correct, is_key=True)
        error += float((coded_k - k).square().sum())
        power += float(k.square().sum())
        keys.append(coded_k)
        values.append(None if v is None else _coded(v, profile, correct, is_key=False))
    made = Prefill(context.token_ids, tuple(keys), tuple(values))
    return made, (error / power) ** 0.5


def _coded(x: Tensor, profile: Profile, correct: bool, *, is_key: bool) -> Tensor:
    """x [T, G, D]"""
    end = len(x) // BLOCK * BLOCK
    blocks = x[BLOCK:end].unflatten(0, (-1, BLOCK)).transpose(1, 2)
    there = (fake_quantise_keys if is_key else fake_quantise_values)(blocks, profile)
    if correct:
        there = smoothed(there, correction(blocks, there))
    return torch.cat([x[:BLOCK], there.transpose(1, 2).flatten(0, 1), x[end:]])


@torch.no_grad()
def boundary_report(
    model: PolicyModel,
    context: Prefill,
    follow: Sequence[int],
    following: Tensor,
    smoothing: bool,
) -> Iterator[str]:
    """Codes read by full attention; ``smoothing``: and with their boundaries corrected."""
    full = read(model, context, follow, FULL)
    yield f"boundary correction: {'key error':>22}{'KL':>11}{'|dlogp|':>10}"
    profiles: tuple[Profile, ...] = ("k8v8", "literal")
    for profile in profiles:
        for correct in (False, True) if smoothing else (False,):
            coded, error = coded_context(context, profile, correct)
            made = deviation(model, full, read(model, coded, follow, FULL), following)
            name = f"{profile}, corrected" if correct else profile
            yield f"  {name:<30}{error:>10.4%}{made.kl:>12.3e}{made.dlogp:>9.5f}"


@torch.no_grad()
def parts_report(
    model: PolicyModel, context: Prefill, follow: Sequence[int], following: Tensor, parts: int
) -> str:
    """What it costs to prefill the context in parts that do not see each other."""
    full = read(model, context, follow, FULL)
    alone = prefill(model, context.token_ids, parts=parts)
    made = deviation(model, full, read(model, alone, follow, FULL), following)
    return (
        f"prefilled as {parts} independent parts: KL {made.kl:.3g}, |dlogp| {made.dlogp:.3g}, "
        f"same most likely token {made.agreement:.1%}"
    )


def main() -> None:
    """Print the reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=7168)
    parser.add_argument("--tokens", type=int, default=64, help="queries of the first report")
    parser.add_argument("--read", type=int, default=384, help="tokens of the second")
    parser.add_argument("--smoothing", action="store_true", help="correct block boundaries too")
    parser.add_argument("--parts", type=int, default=4, help="independent ones; 1: leave out")
    parser.add_argument("--text", default="python", choices=sorted(TEXTS))
    parser.add_argument("--cache", type=Path, default=cache_folder())
    options = parser.parse_args()
    try:
        path = smollm2()
        tokenizer, model = load_tokenizer(path), load_model(path).eval()
        wanted = options.context + max(options.tokens, options.read) + 1
        ids = token_ids(TEXTS[options.text](), tokenizer, wanted, options.text)
    except EngineError as error:
        sys.exit(f"kv_claims: {error}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    context = cached_prefill(model, digest, ids[: options.context], options.cache)
    follow = ids[options.context : options.context + options.tokens]
    sys.stdout.write(f"SmolLM2-135M, text {options.text}, context {options.context}\n")
    for line in attention_report(attention_weights(model, context, follow)):
        sys.stdout.write(line + "\n")
    tail = ids[options.context : options.context + options.read]
    after = torch.tensor(ids[options.context + 1 : options.context + options.read + 1])
    for line in boundary_report(model, context, tail, after, options.smoothing):
        sys.stdout.write(line + "\n")
    if options.parts > 1:
        line = parts_report(model, context, tail, after, options.parts)
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
