"""Training of summary adapters: ridge regression, then KL to full attention, base model frozen.

Documents are pieces of one text, prefilled with full attention; that pass gives keys, values,
queries and the teacher's hidden rows. A training step takes some tokens of a document and lets them
read its earlier part as hybrid attention would: sink, window, the best far tokens of the warm part,
and summaries of every far block; the loss is the KL of the next-token distributions. The last
document is kept from the steps and chooses which of them is saved.

Shapes: T tokens of a document, n tokens that read, A query heads, G key-value heads, P = A / G,
D key size, V value size, J far blocks.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.summary import Summaries, Summarise, means_of
from engine.attention.summary_adapters import Adapters, AnchorAdapters, MeanAdapters
from engine.attention.summary_files import model_hash, save_adapters
from engine.attention.summary_fit import Captured, fit_anchor, fit_means, targets
from engine.bench.kv_reading import Prefill, SummariseLayer, prefill
from engine.chat.base import Tokenizer
from engine.errors import EngineError
from engine.kvcache.quantise import BLOCK
from engine.kvcache.router.encoder import HashingEncoder, SummaryEncoder, check_encoder
from engine.model.model import PolicyModel
from engine.model.summaries import geometry_of

MAP_RATE, BIAS_RATE, GATE_RATE = 2e-4, 1e-3, 0.1
"""Adam's steps: features are about 1, so a map moves its output by some hundred times its rate."""
SHUT = 3.0
"""Gates are lowered by so much before KL training: fitted maps read too loud on other texts, and
from nearly shut gates training opens those that help."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """length: tokens of a document. window, warm, topk: how it is read; what is older than window +
    warm is cold. reads: tokens of a step. minutes: of processor time that KL training may take."""

    documents: int = 4
    length: int = 1024
    window: int = 128
    warm: int = 128
    topk: int = 64
    reads: int = 48
    steps: int = 48
    minutes: float = 6.0
    num_queries: int = 64
    hidden: int = 256
    seed: int = 0

    def check(self) -> None:
        if self.first_read + self.reads > self.length or self.documents < 2:
            raise EngineError(
                f"training wants at least 2 documents (given {self.documents}) of window + warm + "
                f"{BLOCK * 8} + reads = {self.first_read + self.reads} tokens (given "
                f"{self.length}); raise them"
            )

    @property
    def first_read(self) -> int:
        """Steps start here or later, so that something is cold."""
        return max(self.window + self.warm + 8 * BLOCK, self.length // 2)


@dataclass(frozen=True, slots=True)
class Document:
    """queries: for each layer [T, A, D]. hidden [T, H]: the teacher's. vectors [blocks, E] of the
    blocks' texts, None without an encoder."""

    stored: Prefill
    queries: tuple[Tensor, ...]
    hidden: Tensor
    vectors: Tensor | None


@torch.no_grad()
def read_documents(
    model: PolicyModel,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    plan: TrainingPlan,
    encoder: SummaryEncoder | None = None,
) -> Iterator[Document]:
    """Pieces of token_ids, evenly spread. EngineError when there are too few tokens."""
    plan.check()
    wanted = plan.documents * plan.length
    if len(token_ids) < wanted:
        raise EngineError(
            f"the text has {len(token_ids)} tokens, {plan.documents} documents of {plan.length} "
            f"need {wanted}; take a longer text or a shorter --length"
        )
    step = (len(token_ids) - plan.length) // (plan.documents - 1)
    for number in range(plan.documents):
        ids = token_ids[number * step : number * step + plan.length]
        queries: list[list[Tensor]] = []
        hidden: list[Tensor] = []
        stored = prefill(model, ids, queries=queries, hidden=hidden)
        layers = tuple(torch.cat(list(parts)) for parts in zip(*queries, strict=True))
        vectors = None if encoder is None else block_vectors(tokenizer, ids, encoder)
        yield Document(stored, layers, torch.cat(hidden), vectors)


def encoder_of(name: str) -> SummaryEncoder:
    """hashing or minilm."""
    if name == "hashing":
        return HashingEncoder()
    from engine.kvcache.router.minilm import MiniLMEncoder

    return MiniLMEncoder()


def block_vectors(
    tokenizer: Tokenizer, token_ids: Sequence[int], encoder: SummaryEncoder
) -> Tensor:
    """[whole blocks, E]: the mean over the chunks of each block's text, of length 1."""
    rows: list[Tensor] = []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        text = tokenizer.decode(list(token_ids[start : start + BLOCK]))
        mean = encoder.encode(encoder.split(text)).mean(dim=0)
        rows.append(mean / mean.norm().clamp(min=1e-6))
    return torch.stack(rows)


# -- ridge -----------------------------------------------------------------------------------------


@torch.no_grad()
def fit(adapters: Adapters, documents: Sequence[Document], plan: TrainingPlan) -> None:
    """Ridge regression, a layer at a time."""
    geometry = adapters.geometry
    for layer in range(geometry.num_layers):
        found = [targets(captured(d, layer, plan, geometry.value_dim)) for d in documents]
        if isinstance(adapters, MeanAdapters):
            fit_means(adapters, layer, found)
        else:
            fit_anchor(adapters, layer, found, [_vectors(document) for document in documents])


def captured(
    document: Document, layer: int, plan: TrainingPlan, value_dim: int | None = None
) -> Captured:
    """Evenly spread queries of the document's later part."""
    q, k = document.queries[layer], document.stored.keys[layer]
    v = _values(document, layer, value_dim)
    positions = torch.linspace(plan.first_read, plan.length - 1, plan.num_queries).long()
    scaled = q[positions] * q.shape[-1] ** -0.5
    return Captured(
        scaled.unflatten(1, (k.shape[1], -1)),
        positions,
        k.transpose(0, 1),
        v.transpose(0, 1),
        plan.window,
    )


def _vectors(document: Document) -> Tensor:
    assert document.vectors is not None, "documents were read with an encoder"
    return document.vectors


def _values(document: Document, layer: int, size: int | None = None) -> Tensor:
    v = document.stored.values[layer]
    return document.stored.keys[layer][..., :size] if v is None else v


# -- KL --------------------------------------------------------------------------------------------


def summarise_of(adapters: Adapters, vectors: Tensor | None) -> SummariseLayer:
    """What ``read`` wants, for a context whose blocks have these encoder vectors."""
    if isinstance(adapters, MeanAdapters):
        return adapters.summarise
    assert vectors is not None, "anchoring needs the encoder's vectors"
    return adapters.for_context(vectors)


def student(
    model: PolicyModel,
    document: Document,
    start: int,
    plan: TrainingPlan,
    summarise: SummariseLayer | None,
) -> Tensor:
    """Hidden rows [reads, H] of the tokens from ``start`` on, which read what is before them as
    hybrid attention does (exact scores instead of codes; the tiers are those of ``start``). None:
    no summaries. Gradients go to the summaries."""
    ids = torch.tensor(document.stored.token_ids[start : start + plan.reads])
    latent = model.config.is_mla
    size = model.config.cached_value_dim

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = _values(document, layer, size)[:start]
        context = document.stored.keys[layer][:start].transpose(0, 1), values.transpose(0, 1)
        new = k.transpose(0, 1), (k[..., :size] if latent else v).transpose(0, 1)

        def given(means: Summaries) -> Summaries:
            assert summarise is not None, "asked for"
            return summarise(layer, means)

        return read_far(q, context, new, plan, None if summarise is None else given)

    positions = torch.arange(start, start + len(ids))
    hidden, _ = model(ids, positions, attend, absorbed=latent)
    return hidden


def read_far(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    plan: TrainingPlan,
    summarise: Summarise | None,
) -> Tensor:
    """q [n, A, D]; context k [G, S, D], v [G, S, V]; new k [G, n, D], v [G, n, V] -> [n, A, V]."""
    k, v = context
    start, groups = k.shape[1], len(k)
    hot_from = max(1, (start - plan.window) // BLOCK) * BLOCK
    warm_from = max(BLOCK, hot_from - plan.warm // BLOCK * BLOCK)
    rows = (q * q.shape[-1] ** -0.5).unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    near_k = torch.cat([k[:, :BLOCK], k[:, hot_from:], new[0]], dim=1)
    near_v = torch.cat([v[:, :BLOCK], v[:, hot_from:], new[1]], dim=1)
    n = len(q)
    near = torch.matmul(rows, near_k[:, None].transpose(-1, -2))
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    near = near.masked_fill(torch.nn.functional.pad(future, (near.shape[-1] - n, 0)), -torch.inf)
    far = torch.matmul(rows, k[:, None, warm_from:hot_from].transpose(-1, -2))
    least = far.detach().topk(min(plan.topk, far.shape[-1]), dim=-1).values[..., -1:]
    chosen = far.detach() >= least
    logits = [near, far.masked_fill(~chosen, -torch.inf)]
    values = [near_v, v[:, warm_from:hot_from]]
    if summarise is not None:
        coded = slice(BLOCK, hot_from)
        made = summarise(means_of(k[:, coded], v[:, coded], torch.arange(1, hot_from // BLOCK)))
        counts = chosen.unflatten(-1, (-1, BLOCK)).sum(-1)
        cold = (warm_from - BLOCK) // BLOCK
        left = BLOCK - torch.nn.functional.pad(counts, (cold, 0)).float()
        extra = torch.matmul(rows, made.keys[:, None].transpose(-1, -2)) + left.log()
        gate = 0.0 if made.gate is None else made.gate[..., None, None]
        logits.append(extra + gate)
        values.append(made.values)
    weights = torch.cat(logits, dim=-1).softmax(dim=-1)
    out = torch.matmul(weights, torch.cat(values, dim=1)[:, None])
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def kl(model: PolicyModel, teacher: Tensor, hidden: Tensor) -> Tensor:
    """Mean over rows of KL(teacher, student) of next tokens, in nats."""
    right = model.logits(teacher).log_softmax(-1)
    ours = model.logits(hidden).log_softmax(-1)
    return (right.exp() * (right - ours)).sum(-1).mean()


@dataclass(frozen=True, slots=True)
class Progress:
    """step 0 is before training. seen: loss of the step; held: of the last document."""

    step: int
    seen: float
    held: float
    seconds: float
    """Of this process's processor time: the machine may be busy."""


def train(
    model: PolicyModel, adapters: Adapters, documents: Sequence[Document], plan: TrainingPlan
) -> Iterator[Progress]:
    """KL training in place; a line each time the last document was measured: step 0 are the ones
    given, step 1 has gates nearly shut. In the end ``adapters`` are the best of those."""
    model.requires_grad_(False)
    draw = random.Random(plan.seed)
    began = time.process_time()
    maps = [p for n, p in adapters.named_parameters() if n in ("to_key", "to_value", "trunk")]
    others = [p for n, p in adapters.named_parameters() if n.endswith("bias")]
    groups = [(maps, MAP_RATE), (others, BIAS_RATE), ([adapters.gate], GATE_RATE)]
    for parameters, _ in groups:
        for parameter in parameters:
            parameter.requires_grad_(True)
    optimiser = torch.optim.Adam([{"params": p, "lr": rate} for p, rate in groups])
    *seen, last = documents
    held = held_loss(model, adapters, last, plan)
    best, kept = held, copy.deepcopy(adapters.state_dict())
    yield Progress(0, math.nan, held, time.process_time() - began)
    adapters.gate.data -= SHUT
    every = max(1, plan.steps // 4)
    for step in range(1, plan.steps + 1):
        document = seen[step % len(seen)]
        start = draw.randrange(plan.first_read, plan.length - plan.reads + 1)
        teacher = document.hidden[start : start + plan.reads]
        summarise = summarise_of(adapters, document.vectors)
        loss = kl(model, teacher, student(model, document, start, plan, summarise))
        if not math.isfinite(loss.item()):
            raise EngineError(f"KL {loss.item()} in step {step}: the text or the model is broken")
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for ps, _ in groups for p in ps], 1.0)
        optimiser.step()
        late = time.process_time() - began > 60 * plan.minutes
        if step % every == 0 or step == 1 or late or step == plan.steps:
            held = held_loss(model, adapters, last, plan)
            if held < best:
                best, kept = held, copy.deepcopy(adapters.state_dict())
            yield Progress(step, loss.item(), held, time.process_time() - began)
        if late:
            break
    adapters.load_state_dict(kept)
    adapters.requires_grad_(False)


@torch.no_grad()
def held_loss(
    model: PolicyModel, adapters: Adapters | None, document: Document, plan: TrainingPlan
) -> float:
    """KL of two pieces of a document; None: without summaries."""
    starts = (plan.first_read, plan.length - plan.reads)
    summarise = None if adapters is None else summarise_of(adapters, document.vectors)
    losses = [
        kl(model, document.hidden[s : s + plan.reads], student(model, document, s, plan, summarise))
        for s in starts
    ]
    return float(torch.stack(losses).mean())


# -- the command -----------------------------------------------------------------------------------


def train_summaries(
    model: PolicyModel,
    tokenizer: Tokenizer,
    text: str,
    plan: TrainingPlan,
    out: Path,
    encoder: SummaryEncoder | None = None,
) -> Iterator[str]:
    """Read, fit, train, save; lines of progress and what to do with the result. ``encoder`` None:
    adapters of block means, else the anchoring MLP from its vectors."""
    plan.check()
    if encoder is not None:
        check_encoder(encoder)
    ids = tokenizer.encode(text)
    documents: list[Document] = []
    for document in read_documents(model, tokenizer, ids, plan, encoder):
        documents.append(document)
        yield f"read {len(documents)}/{plan.documents} documents of {plan.length} tokens"
    geometry = geometry_of(model.config)
    adapters: Adapters = MeanAdapters(geometry)
    if encoder is not None:
        adapters = AnchorAdapters(geometry, encoder.name, encoder.dimension, plan.hidden)
    without = held_loss(model, None, documents[-1], plan)
    yield f"held document, KL to full attention without summaries: {without:.4f}"
    fit(adapters, documents, plan)
    best = math.inf
    for progress in train(model, adapters, documents, plan):
        best = min(best, progress.held)
        seen = "ridge alone" if progress.step == 0 else f"KL {progress.seen:.4f}"
        yield (
            f"step {progress.step}/{plan.steps}: {seen}, held document {progress.held:.4f}, "
            f"{progress.seconds:.0f} s of processor time"
        )
    save_adapters(adapters, out, model_hash(model.state_dict()))
    yield f"saved {out}: held document {best:.4f}, without summaries {without:.4f}"
    if best < without:
        yield f"they help: set summary_weight = 1 and summary_adapters = {str(out)!r}"
    else:
        yield "they do not help on the held document: leave summary_weight at 0"
