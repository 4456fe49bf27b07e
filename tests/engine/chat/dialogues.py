"""Small vocabularies of each kind, and dialogues of any text, also text that spells markers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.chat.base import CallText, Message, ToolDeclaration
from engine.chat.hf_tokenizer import HFTokenizer
from engine.chat.kimi_tokenizer import KimiTokenizer
from engine.chat.markers import SPECIAL_TOKENS

SMALL_RANKS = Path(__file__).parents[2] / "data" / "kimi" / "small.tiktoken"
CHATML_MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CALL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPELLED = (*SPECIAL_TOKENS, *CHATML_MARKERS, *CALL_MARKERS, "## Return of f:0\n", "\n", "assistant")

LOOKUP = ToolDeclaration(
    "lookup",
    "Read one value.\nFast. 读",
    {
        "type": "object",
        "properties": {
            "key": {"type": "string", "description": "which one", "minLength": 1},
            "count": {"type": "integer", "default": 1},
        },
        "required": ["key"],
    },
)
CALC = ToolDeclaration("calc")


@cache
def small_kimi() -> KimiTokenizer:
    return KimiTokenizer.from_file(SMALL_RANKS)


@cache
def hf_description(call_markers: bool) -> str:
    """A ``tokenizer.json`` trained on a few words, with or without ids for calls."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CHATML_MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ['system user assistant tool_call {"name": "lookup", "arguments": {"key": "a"}}'] * 9
    tokenizer.train_from_iterator(corpus, trainer)
    if call_markers:
        # as in Qwen: added, but not flagged as special
        tokenizer.add_tokens([tokenizers.AddedToken(m, normalized=False) for m in CALL_MARKERS])
    return tokenizer.to_str()


@cache
def small_hf(call_markers: bool = True) -> HFTokenizer:
    return HFTokenizer(json.loads(hf_description(call_markers)))


def ids_of(text: str, tokenizer: HFTokenizer) -> list[int]:
    """Ids of text in which the vocabulary's markers are spelled out."""
    ids: list[int] = []
    while text:
        at, name = min((text.find(m) % (len(text) + 1), m) for m in tokenizer.special_tokens)
        ids += tokenizer.encode(text[:at])
        ids += [tokenizer.special_id(name)] if at < len(text) else []
        text = text[at + len(name) :]
    return ids


plain = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
texts = st.lists(st.one_of(plain, st.sampled_from(SPELLED)), max_size=4).map("".join)
calls = st.builds(CallText, texts.map(str.strip), texts.map(str.strip))
json_calls = st.builds(
    CallText,
    plain,
    st.dictionaries(texts, texts, max_size=2).map(lambda d: json.dumps(d, ensure_ascii=False)),
)
"""Calls whose arguments are JSON; their strings may spell any marker."""


@st.composite
def dialogues(
    draw,
    *,
    thinking: bool = False,
    names: bool = False,
    call=calls,
    content=texts,
    result_ids: bool = True,
    first=("system", "user", "assistant", "tool"),
):
    """Any order of roles after one of ``first``."""
    rest = st.sampled_from(["system", "user", "assistant", "tool"])
    messages: list[Message] = []
    for index in range(draw(st.integers(0, 5))):
        role = draw(rest if index else st.sampled_from(first))
        name = draw(plain.filter(_is_a_name)) if names and role in ("user", "tool") else ""
        if role == "assistant":
            turn_calls = tuple(draw(st.lists(call, max_size=3)))
            reasoning = draw(texts) if thinking else ""
            messages.append(Message(role, draw(content), turn_calls, reasoning=reasoning))
        elif role == "tool" and result_ids:
            call_id = draw(texts).replace("\n", "") or "f:0"
            messages.append(Message(role, draw(texts), call_id=call_id, name=name))
        else:
            messages.append(Message(role, draw(texts), name=name))
    return messages


def _is_a_name(text: str) -> bool:
    return text not in ("system", "tool_declare", "tool", "user")
