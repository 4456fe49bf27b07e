"""Knobs of the tiered KV cache; no torch here, configurations must load without it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import ConfigModel

BLOCK = 32
"""Tokens of a block."""


class TierConfig(ConfigModel):
    hot: int = Field(default=2048, ge=0)
    """Newest tokens in full precision; the first block always is."""
    warm: int = Field(default=65536, ge=0, multiple_of=BLOCK)
    """Tokens before those that stay on the device in codes; older ones are cold."""
    profile: Literal["k8v8", "k8v4", "literal", "full"] = "k8v8"
    """Codes of warm blocks, see engine.kvcache.quantise. full: everything is hot."""
    cold: Literal["host", "disk", "off"] = "host"
    """Where cold blocks go: host memory, host memory and then a file, or nowhere (blocks stay warm
    however old they are)."""
    directory: Path | None = None
    """Folder of the file of cold blocks; needed for disk."""
    host_bytes: int = Field(default=4 << 30, ge=0)
    """Host memory for cold blocks. When it is full, disk moves the oldest ones to the file and host
    keeps new ones on the device."""
    deterministic: bool = True
    """A block's tier depends on position and context length only, so that a learner can repeat it:
    no demotion under memory pressure, re-warming waits until it is complete."""
    debug_nan: bool = False
    """Fill freed blocks with NaN, so that reading one shows."""

    @model_validator(mode="after")
    def _folder_for_disk(self) -> Self:
        if self.cold == "disk" and self.directory is None:
            raise ValueError("cold = 'disk' needs a directory; name a folder on a local disk")
        return self
