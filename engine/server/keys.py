"""API keys: who may ask, by name. Only digests are kept, every comparison takes the same time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from engine.server.config import ListenSection
from engine.server.errors import KeysError, Unauthorized

KEYS_ENV = "PARL_SERVE_KEYS"
MIN_KEY_CHARS = 16
ANYONE = "anonymous"
_SHAPE = re.compile(r"[A-Za-z0-9._~+/=-]+")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAKE = 'make one with `echo "app $(openssl rand -hex 32)" > keys; chmod 600 keys`'


class Keys:
    """Names by the digest of their key; empty = everybody may ask."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys``: key -> name."""
        self._names = {_digest(key): name for key, name in keys.items()}

    def __len__(self) -> int:
        return len(self._names)

    def user_of(self, authorization: str) -> str:
        """Name of the key in an Authorization header; Unauthorized."""
        if not self._names:
            return ANYONE
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = ""
        # all of them, always: how long it takes says nothing about where the key stands
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise Unauthorized("no valid API key; expected the header `Authorization: Bearer KEY`")
        return found


def load_keys(listen: ListenSection, environ: Mapping[str, str] | None = None) -> Keys:
    """From listen.keys_file, else from $PARL_SERVE_KEYS.

    KeysError where there are none although the server listens beyond loopback, or where a key is
    short, repeated, of letters that a header cannot carry, or readable by other users.
    """
    environ = os.environ if environ is None else environ
    keys: dict[str, str] = {}
    for where, name, key in _given(listen, environ):
        if not _NAME.fullmatch(name):
            raise KeysError(f"{where}: name {name[:40]!r}, expected letters, digits or ._-")
        if len(key) < MIN_KEY_CHARS or not _SHAPE.fullmatch(key):
            raise KeysError(
                f"{where}: the key of {name} holds {len(key)} characters; expected at least "
                f"{MIN_KEY_CHARS} letters, digits or ._~+/=- (`openssl rand -hex 32`)"
            )
        if key in keys:
            raise KeysError(f"{where}: {name} and {keys[key]} have the same key; give each its own")
        keys[key] = name
    if not keys and not listen.is_loopback:
        raise KeysError(
            f"listen.host = {listen.host!r} is beyond loopback and there are no API keys; set "
            f"listen.keys_file or {KEYS_ENV}, or listen on 127.0.0.1 ({_MAKE})"
        )
    return Keys(keys)


def _given(listen: ListenSection, environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(where it stands, name, key) of every key."""
    if listen.keys_file:
        return [(f"{listen.keys_file}:{i}", *_pair(line)) for i, line in _lines(listen.keys_file)]
    entries = [entry.strip() for entry in environ.get(KEYS_ENV, "").split(",")]
    found: list[tuple[str, str, str]] = []
    for entry in filter(None, entries):
        # '=' may end a key
        name, equals, key = entry.partition("=")
        named = bool(equals) and bool(key.strip("="))
        found.append((KEYS_ENV, name.strip(), key.strip()) if named else (KEYS_ENV, "key", entry))
    return found


def _lines(file: str) -> list[tuple[int, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        mode = Path(file).stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise KeysError(
            f"listen.keys_file {file}: {reason}; expected lines `NAME KEY`; {_MAKE}"
        ) from error
    if mode & 0o077:
        raise KeysError(
            f"listen.keys_file {file}: other users can read it (mode {mode & 0o777:o}, expected "
            f"600); chmod 600 {file}"
        )
    lines = enumerate(text.splitlines(), start=1)
    return [(i, line) for i, line in lines if line.strip() and not line.lstrip().startswith("#")]


def _pair(line: str) -> tuple[str, str]:
    name, _, key = line.strip().partition(" ")
    return (name, key.strip()) if key.strip() else ("key", name)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
