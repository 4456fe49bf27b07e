"""A policy built by hand that looks things up, for contexts no small trained model can read.

Two layers, one head, no training. The first layer's head finds the token before by rotary phase
alone and copies its code; the second finds where the token before was the present one and copies
what followed (an induction head; Olsson et al. 2022, "In-context Learning and Induction Heads").
Rotary pairs with a frequency below 1e-7 carry content, so a fact is found over any distance that
the cache still holds. It says nothing of what trained models do; it shows that the cache gives back
what lies in it.

Text: words of what Python ships (engine.bench.kv_texts), one token a word, and facts "KEY n1 n2 ..
END" whose numbers of three digits occur nowhere else. Shapes: H hidden, D head size, C code size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.bench.kv_texts import TEXTS
from engine.errors import EngineError
from engine.model.config import AttentionConfig, ModelConfig
from engine.model.model import PolicyModel, initialise
from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set

CODE = 64
HEAD = 96
CONTENT = 16
"""Rotary pairs from this one on turn less than .01 in 100,000 tokens."""
POSITION = 10
"""Pairs below this one tell neighbours apart."""
HIDDEN = 3 * CODE + 16
CONSTANT = 8.0
"""Value of the channel that every token shares; it feeds the first layer's query and key."""
BEFORE = 60.0
"""Scale of the first layer's scores, per rotary pair."""
MATCH = 80.0
"""Score of a match in the second; strangers reach 0.6 of it at most."""
END, NUM_NUMBERS = "END", 900


@dataclass(frozen=True, slots=True)
class Fact:
    """``position``: where its key is in the context; ``answer`` ends with END."""

    key: int
    answer: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Library:
    """A context with facts in it. ``names``: text of each token id."""

    names: tuple[str, ...]
    token_ids: tuple[int, ...]
    facts: tuple[Fact, ...]

    @property
    def end(self) -> int:
        return self.names.index(END)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.names[i] for i in token_ids)


def library(num_tokens: int, positions: Sequence[int], seed: int = 3) -> Library:
    """Real words, and a fact at each of ``positions``, of 3 to 6 numbers. EngineError when a fact
    does not fit."""
    if max(positions) + 8 > num_tokens or len(positions) > NUM_NUMBERS // 6:
        raise EngineError(
            f"facts at {list(positions)} in a context of {num_tokens} tokens; expected positions "
            f"up to {num_tokens - 8}, {NUM_NUMBERS // 6} at most"
        )
    words = re.findall(r"[a-z]+", TEXTS["python"]().lower())
    known = sorted(set(words))
    numbers = [str(n) for n in range(100, 100 + NUM_NUMBERS)]
    keys = [f"case{i}" for i in range(len(positions))]
    names = (*known, *numbers, *keys, END)
    place = {name: i for i, name in enumerate(names)}
    draw = random.Random(seed)
    left = draw.sample(numbers, NUM_NUMBERS)
    ids = [place[word] for word in islice(cycle(words), num_tokens)]
    facts: list[Fact] = []
    for i, position in enumerate(positions):
        count = 3 + i % 4
        said, left = left[:count], left[count:]
        answer = (*(place[n] for n in said), place[END])
        ids[position : position + 1 + len(answer)] = [place[keys[i]], *answer]
        facts.append(Fact(place[keys[i]], answer, position))
    return Library(names, tuple(ids), tuple(facts))


def model_config(vocab_size: int, max_tokens: int, **attention: object) -> ModelConfig:
    """``attention``: fields of AttentionConfig besides mode."""
    section = AttentionConfig.model_validate({"mode": "hybrid", **attention})
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        intermediate_size=32,
        attention=section,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        rope_theta=1e21,
        max_position_embeddings=max_tokens,
    )


def small_attention(window: int = 64, hot: int = 64) -> dict[str, object]:
    """For short contexts."""
    hybrid = HybridConfig(window=window, topk=16, candidates=64, dense_below=0)
    return {"hot": hot, "hybrid": hybrid.model_dump()}


def recall_weights(config: ModelConfig, seed: int = 1) -> WeightSet:
    model = build(config, seed)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return make_weight_set(1, tensors, config.model_dump(mode="json"))


@torch.no_grad()
def build(config: ModelConfig, seed: int = 1) -> PolicyModel:
    """The weights, see the module's text."""
    model = PolicyModel(config, seed=None)
    initialise(model, 0)
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2, (config.vocab_size, CODE), generator=draw).float() * 2 - 1
    model.embed_tokens.zero_()
    model.embed_tokens[:, :CODE] = codes
    model.embed_tokens[:, -1] = CONSTANT
    assert model.lm_head is not None, "the head is its own"
    model.lm_head.zero_()
    model.lm_head[:, 2 * CODE : 3 * CODE] = codes
    norms = [CODE * filled + CONSTANT**2 for filled in (1, 2, 3)]
    weights = [(norm / HIDDEN) ** 0.5 for norm in norms]
    model.norm.weight.fill_(weights[2])
    for index, parts in enumerate((_before(), _match())):
        block: torch.nn.Module = model.layers[index]
        state = dict(block.named_parameters())
        state["input_layernorm.weight"].fill_(weights[index])
        state["mlp.down_proj"].zero_()
        for name, part in zip("qkvo", parts, strict=True):
            state[f"self_attn.{name}_proj"].copy_(part)
    return model


def _before() -> Iterator[Tensor]:
    """q, k, v, o of the first layer: a query's phase is one token behind its own."""
    frequency = 1e21 ** -(torch.arange(POSITION, dtype=torch.float64) / (HEAD // 2))
    amplitude = (BEFORE * HEAD**0.5) ** 0.5 / CONSTANT
    q, k = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    q[:POSITION, -1] = (amplitude * frequency.cos()).float()
    q[HEAD // 2 : HEAD // 2 + POSITION, -1] = (-amplitude * frequency.sin()).float()
    k[:POSITION, -1] = amplitude
    yield q
    yield k
    yield from _copy(source=0, target=CODE)


def _match() -> Iterator[Tensor]:
    """q, k, v, o of the second layer: this token against what each key's token came after."""
    amplitude = (MATCH * HEAD**0.5 / CODE) ** 0.5
    half = HEAD // 2
    content = [*range(CONTENT, half), *range(half + CONTENT, HEAD)]
    q, k = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    for channel, row in enumerate(content):
        q[row, channel] = amplitude
        k[row, CODE + channel] = amplitude
    yield q
    yield k
    yield from _copy(source=0, target=2 * CODE)


def _copy(source: int, target: int) -> Iterator[Tensor]:
    v, o = torch.zeros(HEAD, HIDDEN), torch.zeros(HIDDEN, HEAD)
    each = torch.arange(CODE)
    v[each, source + each] = 1.0
    o[target + each, each] = 1.0
    yield v
    yield o
