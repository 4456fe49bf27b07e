"""Tokenizer and renderer of a model from its folder or GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.chat.base import Tokenizer
from engine.chat.chatml import ChatMLRenderer
from engine.chat.dialogue import Renderer
from engine.chat.gguf_vocab import read_metadata, tokenizer_json
from engine.chat.hermes import IM_START
from engine.chat.hf_tokenizer import TOKENIZER_FILE, HFTokenizer
from engine.chat.kimi import K2Renderer, K25Renderer
from engine.chat.kimi_tokenizer import RANK_FILE, KimiTokenizer
from engine.errors import ChatError

_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)([^{}<>'\"]+)<\|im_end\|>")
_K25 = "kimi_k25"


def load_tokenizer(path: Path) -> Tokenizer:
    """Kimi's ranks, a ``tokenizer.json`` or the vocabulary of a GGUF file; ChatError for none."""
    if path.suffix == ".gguf":
        return HFTokenizer(tokenizer_json(read_metadata(path)))
    if (path / RANK_FILE).exists():
        return KimiTokenizer.from_file(path)
    if (path / TOKENIZER_FILE).exists():
        return HFTokenizer.from_file(path)
    raise ChatError(
        f"{path} has neither {RANK_FILE} nor {TOKENIZER_FILE}; expected a model folder with one of "
        "them, or a GGUF file"
    )


def load_renderer(path: Path, thinking: bool = True) -> Renderer:
    """The format the model was trained on; ChatError where it is none of ours.

    Kimi K2.5 by ``model_type``, other Kimi vocabularies as K2; ChatML wherever the vocabulary has
    its markers. ``thinking`` False is K2.5's instant mode; other models have no choice.
    """
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, KimiTokenizer):
        config = _json(path / "config.json")
        # a converted K2.5 is a kimi_k2 that says which format it speaks
        is_k25 = _K25 in (config.get("model_type"), config.get("chat_format"))
        return K25Renderer(tokenizer, thinking) if is_k25 else K2Renderer(tokenizer)
    if not tokenizer.has_special(IM_START):
        raise ChatError(
            f"{path} has no {IM_START} in its vocabulary; the chat formats here are Kimi's and "
            "ChatML (SmolLM2, Qwen): a base model cannot chat"
        )
    return ChatMLRenderer(tokenizer, default_system_of(_template(path)))


def default_system_of(template: str) -> str | None:
    """The system text that a ChatML template writes where none is given, if it is spelled out."""
    found = _DEFAULT_SYSTEM.search(template)
    return None if found is None else found[1]


def _template(path: Path) -> str:
    if path.suffix == ".gguf":
        return str(read_metadata(path).get("tokenizer.chat_template", ""))
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    return str(_json(path / "tokenizer_config.json").get("chat_template") or "")


def _json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatError(f"{path} is no JSON ({error})") from error
