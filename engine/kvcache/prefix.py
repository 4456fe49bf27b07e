"""Names of cached prefixes that mean the same in every process and on every machine.

sha256 over what decides a block's content, never Python's hash(), which changes with each process:
that cost other caches all their hits across processes (facts/kv-attention.md 8.12).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from engine.kvcache.config import BLOCK

LAYOUT_VERSION = 1
"""Raise it when the bits of a stored block mean something else."""


def model_hash(model_id: str) -> bytes:
    """32 bytes that name a model, its weights and whatever else decides what is cached."""
    return hashlib.sha256(model_id.encode()).digest()


def prefix_key(model_id: str, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a block whose prefix has the key ``parent`` (b"" for the first block)."""
    digest = hashlib.sha256()
    name = model_id.encode()
    digest.update(len(name).to_bytes(8, "little") + name)
    digest.update(LAYOUT_VERSION.to_bytes(4, "little"))
    digest.update(len(parent).to_bytes(8, "little") + parent)
    digest.update(np.asarray(token_ids, "<i8").tobytes())
    return digest.digest()


def prefix_keys(model_id: str, token_ids: Sequence[int]) -> list[bytes]:
    """Keys of the whole blocks of a context, each made from the one before."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = keys[-1] if keys else b""
        keys.append(prefix_key(model_id, parent, token_ids[start : start + BLOCK]))
    return keys
