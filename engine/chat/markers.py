"""Names of Kimi's special tokens, in the order of their ids in the K2.5 vocabulary.

Source: facts/kimi-facts.md 1.3 (tokenizer) and 1.4 (template).
"""

from __future__ import annotations

BOS = "[BOS]"
EOS = "[EOS]"
IM_END = "<|im_end|>"
IM_USER = "<|im_user|>"
IM_ASSISTANT = "<|im_assistant|>"
IM_SYSTEM = "<|im_system|>"
SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
IM_MIDDLE = "<|im_middle|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
THINK_BEGIN = "<think>"
THINK_END = "</think>"
UNK = "[UNK]"
PAD = "[PAD]"

SPECIAL_TOKENS: tuple[str, ...] = (
    BOS,
    EOS,
    IM_END,
    IM_USER,
    IM_ASSISTANT,
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[EOT]",
    IM_SYSTEM,
    SECTION_BEGIN,
    SECTION_END,
    CALL_BEGIN,
    ARGUMENT_BEGIN,
    CALL_END,
    IM_MIDDLE,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    THINK_BEGIN,
    THINK_END,
    UNK,
    PAD,
)

SINGULAR_SECTION = {
    "<|tool_call_section_begin|>": SECTION_BEGIN,
    "<|tool_call_section_end|>": SECTION_END,
}
"""Spelling of the K2 report's appendix; seen in the wild, so text mode reads it too."""

NUM_SPECIAL_TOKENS = 256
"""Ids behind the merges of a Kimi vocabulary; most have no name but <|reserved_token_ID|>."""

_OFFSETS = {
    # the names above in the order of their ids; 163584 is offset 0
    **dict(zip(SPECIAL_TOKENS[:5], range(5), strict=True)),
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    **dict(zip(SPECIAL_TOKENS[8:14], range(10, 16), strict=True)),
    **dict(zip(SPECIAL_TOKENS[14:21], range(17, 24), strict=True)),
    UNK: 254,
    PAD: 255,
}


def kimi_special_ids(first_id: int) -> dict[str, int]:
    """Name -> id of all special tokens of a Kimi vocabulary whose merges end before ``first_id``
    (163584 in the released one)."""
    names = {offset: name for name, offset in _OFFSETS.items()}
    return {
        names.get(offset, f"<|reserved_token_{first_id + offset}|>"): first_id + offset
        for offset in range(NUM_SPECIAL_TOKENS)
    }
