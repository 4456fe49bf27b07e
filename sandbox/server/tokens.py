"""Bearer tokens: one of the orchestrator, one a session for its agent."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from sandbox.server.config import MIN_TOKEN_CHARS
from sandbox.server.errors import BadToken

TOKEN_ENV = "PARL_SANDBOX_TOKEN"
_SHAPE = re.compile(r"[A-Za-z0-9._~+/=-]+")


def load_token(file: Path | None, environ: Mapping[str, str] | None = None) -> str:
    """The orchestrator's token from ``file``, else from $PARL_SANDBOX_TOKEN.

    BadToken when there is none, it is shorter than 16 characters, holds characters a header cannot
    carry, or its file can be read by other users.
    """
    environ = os.environ if environ is None else environ
    if file is None:
        if not environ.get(TOKEN_ENV):
            raise BadToken(
                f"no token for the orchestrator door: expected --token-file or {TOKEN_ENV}; make "
                "one with `(umask 077; openssl rand -hex 32 > token)`"
            )
        return _checked(environ[TOKEN_ENV].strip(), TOKEN_ENV)
    try:
        text = file.read_text(encoding="utf-8").strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise BadToken(
            f"token file {file}: {error.strerror}; expected a file with one token"
        ) from error
    except UnicodeDecodeError as error:
        raise BadToken(f"token file {file}: is not UTF-8 text; expected one token") from error
    if mode & 0o077:
        raise BadToken(
            f"token file {file}: other users can read it (mode {mode & 0o777:o}, expected 600); "
            f"chmod 600 {file}"
        )
    return _checked(text, f"token file {file}")


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN_CHARS or not _SHAPE.fullmatch(token):
        raise BadToken(
            f"{where}: holds {len(token)} characters; expected one token of at least "
            f"{MIN_TOKEN_CHARS} letters, digits or ._~+/=- (`openssl rand -hex 32`)"
        )
    return token


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What the server keeps of a session's token; looking a digest up gives its time away, which
    says nothing about the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def same(token: str, other_digest: str) -> bool:
    """Constant-time comparison of a token with a digest."""
    return hmac.compare_digest(digest(token), other_digest)
