"""What a request signer gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Signable:
    """A request as it will be sent; ``path`` percent-encoded, ``query`` decoded pairs."""

    method: str
    host: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    body: bytes


class Signer(Protocol):
    """Pure but for the time it is given."""

    def sign(self, request: Signable, now: datetime) -> dict[str, str]:
        """Headers to add; the last thing done to a request."""
        ...


SignerFactory = Callable[[str, Mapping[str, str], Callable[[str], str]], Signer]
"""(secret, options of the configuration, look-up of other secrets by name) -> signer. ValueError
names a missing option."""
