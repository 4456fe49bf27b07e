"""Do block summaries help a context whose early part is cold? An ablation on real weights.

``python -m engine.bench.summaries [--context 1024] [--minutes 4]``. SmolLM2-135M (``make smollm2``)
reads contexts of real text with full attention; then ``--tokens`` teacher-forced tokens read each
as hybrid attention does: sink, window, the best far tokens of the warm part. What is older is cold
and not seen, but for its summaries: untrained means, maps fitted by ridge regression, the same
after training by KL, and the semantic-anchoring MLP from a frozen sentence encoder, before and
after.

Adapters are trained on parts of pydoc's language reference and of licences, and measured on later
parts of both and on a text of another kind. Printed: KL to full attention, NLL of the next token,
both in nats a token; how long training took, in processor time. Takes about 10 minutes of one core;
``--save`` keeps the trained maps.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.summary_adapters import Adapters, AnchorAdapters, MeanAdapters
from engine.attention.summary_files import model_hash, save_adapters
from engine.bench.kv_reading import FULL, Prefill, SummariseLayer, Variant, prefill, read
from engine.bench.kv_texts import TEXTS, smollm2, token_ids
from engine.bench.summary_training import (
    Document,
    TrainingPlan,
    block_vectors,
    encoder_of,
    fit,
    held_loss,
    read_documents,
    summarise_of,
    train,
)
from engine.chat.base import Tokenizer
from engine.chat.load import load_tokenizer
from engine.errors import EngineError
from engine.kvcache.router.encoder import SummaryEncoder, check_encoder
from engine.model.checkpoint.load import load_model
from engine.model.model import PolicyModel
from engine.model.summaries import geometry_of

TRAINED_ON = ("licences", "python")


@dataclass(frozen=True, slots=True)
class Row:
    """Means over tokens, nats."""

    name: str
    kl: float
    nll: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A held-out text: what is read, what follows, teacher's rows, the blocks' vectors."""

    name: str
    stored: Prefill
    tail: tuple[int, ...]
    full: Tensor
    vectors: Tensor


class Ablation:
    def __init__(
        self,
        path: Path,
        plan: TrainingPlan,
        tokens: int,
        encoder: SummaryEncoder,
        kinds: Sequence[str] = ("means", "anchoring"),
    ) -> None:
        check_encoder(encoder)
        self._plan, self._tokens, self._encoder, self._kinds = plan, tokens, encoder, kinds
        self._tokenizer: Tokenizer = load_tokenizer(path)
        self._model: PolicyModel = load_model(path).eval().requires_grad_(False)
        self.trained: dict[str, Adapters] = {}

    def train(self) -> Iterator[str]:
        """Fill ``trained``; lines of progress."""
        began = time.process_time()
        plan = self._plan
        documents: list[Document] = []
        part = replace(plan, documents=max(2, plan.documents // len(TRAINED_ON)))
        for text in TRAINED_ON:
            ids = self._tokenizer.encode(TEXTS[text]())
            # the end of each text is held out
            ids = ids[: len(ids) * 3 // 5]
            documents += read_documents(self._model, self._tokenizer, ids, part, self._encoder)
        yield f"{len(documents)} documents of {plan.length} tokens read, {_since(began)}"
        held = held_loss(self._model, None, documents[-1], plan)
        yield f"held document without summaries: KL {held:.4f}"
        geometry = geometry_of(self._model.config)
        kinds: dict[str, Adapters] = {
            "means": MeanAdapters(geometry),
            "anchoring": AnchorAdapters(
                geometry, self._encoder.name, self._encoder.dimension, plan.hidden
            ),
        }
        for name in self._kinds:
            adapters = kinds[name]
            began = time.process_time()
            fit(adapters, documents, plan)
            yield f"{name}: ridge, {_since(began)}"
            self.trained[f"{name}, ridge"] = copy.deepcopy(adapters)
            for progress in train(self._model, adapters, documents, plan):
                yield (
                    f"{name}: step {progress.step}, KL {progress.seen:.4f}, held document "
                    f"{progress.held:.4f}, {progress.seconds:.0f} s"
                )
            self.trained[f"{name}, ridge + KL"] = adapters

    def subject(self, name: str) -> Subject:
        plan = self._plan
        wanted = plan.length + self._tokens + 1
        if name in TRAINED_ON:
            ids = self._tokenizer.encode(TEXTS[name]())[-wanted:]
        else:
            ids = token_ids(TEXTS[name](), self._tokenizer, wanted, name)
        stored = prefill(self._model, ids[: plan.length])
        tail = tuple(ids[plan.length :])
        vectors = block_vectors(self._tokenizer, ids[: plan.length], self._encoder)
        return Subject(name, stored, tail, read(self._model, stored, tail[:-1], FULL), vectors)

    def rows(self, subject: Subject) -> Iterator[Row]:
        """full; nothing cold; the early part cold; then summaries of it."""
        yield self._row("full attention", subject, subject.full)
        base = self.variant(warm=None)
        yield self._measure("window + retrieval, nothing cold", subject, base, None)
        cold = self.variant(warm=self._plan.warm)
        yield self._measure("window + retrieval, early part cold", subject, cold, None)
        mean = self.variant(warm=self._plan.warm, summaries="mean")
        yield self._measure("+ means, untrained", subject, mean, None)
        with_adapters = self.variant(warm=self._plan.warm, summaries="adapters")
        for name, adapters in self.trained.items():
            summarise = summarise_of(adapters, subject.vectors)
            yield self._measure(f"+ {name}", subject, with_adapters, summarise)

    def variant(self, warm: int | None, summaries: str = "") -> Variant:
        plan = self._plan
        config = HybridConfig(window=plan.window, topk=plan.topk, dense_below=0)
        if summaries:
            config = config.model_copy(update={"summary_weight": 1.0, "summaries": summaries})
        return Variant("ablation", "k8v8", config, plan.window, warm)

    def _measure(
        self, name: str, subject: Subject, variant: Variant, summarise: SummariseLayer | None
    ) -> Row:
        tail = subject.tail[:-1]
        hidden = read(self._model, subject.stored, tail, variant, summarise=summarise)
        return self._row(name, subject, hidden)

    @torch.no_grad()
    def _row(self, name: str, subject: Subject, hidden: Tensor) -> Row:
        right = self._model.logits(subject.full).double().log_softmax(-1)
        ours = self._model.logits(hidden).double().log_softmax(-1)
        following = torch.tensor(subject.tail[1:])[:, None]
        return Row(
            name,
            float((right.exp() * (right - ours)).sum(-1).mean()),
            -float(ours.gather(1, following).mean()),
        )

    def save(self, path: Path) -> None:
        adapters = self.trained["means, ridge + KL"]
        save_adapters(adapters, path, model_hash(self._model.state_dict()))


def _since(began: float) -> str:
    return f"{time.process_time() - began:.0f} s"


def report(ablation: Ablation, texts: Sequence[str]) -> Iterator[str]:
    """Lines, each as soon as it is known."""
    yield from ablation.train()
    for name in texts:
        subject = ablation.subject(name)
        yield f"{name:<10}{'':<38}{'KL':>9}{'NLL':>8}"
        for row in ablation.rows(subject):
            yield f"{'':<10}{row.name:<38}{row.kl:>9.4f}{row.nll:>8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="of CPU time of KL training, each kind"
    )
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--texts", default="python,numpy,licences")
    parser.add_argument("--encoder", choices=("minilm", "hashing"), default="minilm")
    parser.add_argument("--kinds", default="means,anchoring")
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = TrainingPlan(
        documents=options.documents,
        length=options.context,
        steps=options.steps,
        minutes=options.minutes,
    )
    try:
        encoder, names = encoder_of(options.encoder), options.kinds.split(",")
        ablation = Ablation(smollm2(), plan, options.tokens, encoder, names)
        for line in report(ablation, options.texts.split(",")):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        if options.save is not None:
            ablation.save(options.save)
    except EngineError as error:
        sys.exit(f"summaries: {error}")


if __name__ == "__main__":
    main()
