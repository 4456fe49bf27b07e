"""HttpRequest: one upstream request before and after secrets are put in."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, quote_plus

from sandbox.proxy.signing.base import Signable


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """``path`` is percent-encoded; ``query`` holds decoded pairs; ``raw_query`` (already encoded,
    for styles whose separators must not be encoded) wins over it. ``body`` is a JSON value."""

    method: str
    scheme: str
    host: str
    port: int | None
    path: str
    query: tuple[tuple[str, str], ...] = ()
    raw_query: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: Any = None
    has_body: bool = False

    @property
    def authority(self) -> str:
        """Host header: the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port is None or self.port == {"http": 80, "https": 443}[self.scheme]:
            return host
        return f"{host}:{self.port}"

    @property
    def encoded_query(self) -> str:
        encoded = "&".join(
            f"{quote_plus(name)}={quote(value, safe='')}" for name, value in self.query
        )
        return "&".join(part for part in (self.raw_query, encoded) if part)

    @property
    def url(self) -> str:
        query = self.encoded_query
        return f"{self.scheme}://{self.authority}{self.path}" + (f"?{query}" if query else "")

    def content(self) -> bytes:
        """Body bytes; empty without a body."""
        if not self.has_body:
            return b""
        return json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )

    def canonical(self) -> dict[str, Any]:
        """What a cassette compares: no scheme and port, they may differ where it is replayed."""
        return {
            "method": self.method,
            "host": self.host,
            "path": self.path,
            "query": sorted([name, value] for name, value in self.query),
            "raw_query": self.raw_query,
            "headers": sorted([name.lower(), value] for name, value in self.headers),
            "body": self.body if self.has_body else None,
        }

    def with_header(self, name: str, value: str) -> HttpRequest:
        """Replaces a header of that name."""
        kept = tuple(item for item in self.headers if item[0].lower() != name.lower())
        return replace(self, headers=(*kept, (name, value)))

    def with_query(self, name: str, value: str) -> HttpRequest:
        """Replaces query parameters of that name."""
        kept = tuple(item for item in self.query if item[0] != name)
        return replace(self, query=(*kept, (name, value)))

    def with_body_field(self, dotted: str, value: str) -> HttpRequest:
        """Sets a field of the JSON body, making objects on the way; ValueError if the body or a
        part on the way is no object."""
        if not isinstance(self.body, dict):
            raise ValueError(f"body field {dotted}: the request has no JSON object as its body")
        body = dict(self.body)
        *parents, last = dotted.split(".")
        place = body
        for name in parents:
            inner = place.get(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"body field {dotted}: {name} is no JSON object")
            place[name] = dict(inner)
            place = place[name]
        place[last] = value
        return replace(self, body=body)

    def signable(self) -> Signable:
        """What signers see."""
        return Signable(
            method=self.method,
            host=self.authority,
            path=self.path,
            query=self.query,
            headers=dict(self.headers),
            body=self.content(),
        )
