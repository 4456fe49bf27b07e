"""Token authentication of Ray (on by default since 2.59): which variables a process needs.

A server is in token mode when RAY_AUTH_MODE=token; a client sends the token of RAY_AUTH_TOKEN or
of the file RAY_AUTH_TOKEN_PATH, else of ~/.ray/auth_token, and only in token mode. `ray job submit`
does not find out by itself, so we always spell the mode out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.errors import ConfigError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

HINT = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with the token the head node was "
    "started with"
)


def auth_env(token_path: str = "", environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables to add to a client's environment; empty = the cluster is taken to be open.

    Order: ``token_path``, what the environment says already, ~/.ray/auth_token if it is there.
    ConfigError when the named file does not exist.
    """
    environ = os.environ if environ is None else environ
    if token_path:
        return _token_file(Path(token_path), "auth_token_path")
    if environ.get(MODE, "").lower() == "disabled":
        return {}
    if environ.get(TOKEN):
        return {MODE: "token"}
    if environ.get(TOKEN_PATH):
        return _token_file(Path(environ[TOKEN_PATH]), TOKEN_PATH)
    default = Path(environ.get("HOME", "~")).expanduser() / ".ray" / "auth_token"
    if default.is_file():
        return _token_file(default, "the default token file")
    return {}


def use_token(token_path: str) -> None:
    """Make this process and its children use ``token_path``; nothing to do when it is empty."""
    if not token_path:
        return
    os.environ.update(auth_env(token_path))
    os.environ.pop(TOKEN, None)  # it would win over the file
    if "ray" in sys.modules:
        # Ray reads the variables once, when it is imported
        # compiled, so pyright cannot see what it holds
        import ray._raylet as raylet  # pyright: ignore[reportMissingImports]

        raylet.Config.initialize("")  # pyright: ignore[reportAttributeAccessIssue]
        raylet.AuthenticationTokenLoader.instance().reset_cache()  # pyright: ignore[reportAttributeAccessIssue]


def _token_file(path: Path, name: str) -> dict[str, str]:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"{name} {path}: no such file; {HINT}")
    return {MODE: "token", TOKEN_PATH: str(path.absolute())}
