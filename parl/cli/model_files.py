"""What belongs to a checkpoint besides its tensors: tokenizer, template, ends of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
]


def require_empty(target: Path) -> None:
    """CheckpointError before anything is read: a folder with files is somebody's."""
    from engine.errors import CheckpointError

    try:
        held = sorted(path.name for path in target.iterdir()) if target.exists() else []
    except OSError as error:
        raise CheckpointError(
            f"{target}: {error.strerror}; expected a new or empty folder that we may write"
        ) from error
    if held:
        raise CheckpointError(f"{target} is not empty ({held[0]}); give a new or empty folder")


def kept_fields(source: Path) -> dict[str, Any]:
    """Fields of the source's config.json that its copy must have too."""
    from engine.model.checkpoint.hub_config import kept, read_config

    return {} if source.suffix == ".gguf" else kept(read_config(source))


def bring_tokenizer(source: Path, folder: Path) -> list[str]:
    """Whatever chats with the source can chat with what is written into ``folder``. Returns what
    the user must know; OSError when a file cannot be copied."""
    import json
    import shutil

    if source.suffix != ".gguf":
        for path in source.iterdir():
            if path.name in TOKENIZER_FILES:
                shutil.copyfile(path, folder / path.name)
        return []
    from engine.chat.gguf_vocab import read_metadata, tokenizer_json
    from engine.errors import ChatError

    metadata = read_metadata(source)
    try:
        vocabulary = tokenizer_json(metadata)
    except ChatError as error:
        return [f"without a tokenizer: {error}"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(str(template))
    return []
