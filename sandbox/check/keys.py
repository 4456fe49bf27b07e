"""The key that signs certificates: Ed25519, one a user, in the user's configuration folder.

Ed25519 and not HMAC, because whoever runs a task must be able to check a certificate without being
able to write one. Trusted are the user's own key and those in ``trusted_keys`` (one public key in
hex a line, # begins a comment).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.errors import SandboxError, TaskError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE = "signing_key"
TRUSTED_FILE = "trusted_keys"


def config_dir() -> Path:
    """``$XDG_CONFIG_HOME/parl``, by default ``~/.config/parl``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "parl"


def load_key(create: bool = True) -> Ed25519PrivateKey:
    """The user's key, made at its first use with mode 0600.

    SandboxError when the file can be read by others, is damaged or (``create`` False) is not there.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = config_dir() / KEY_FILE
    if not path.exists():
        if not create:
            raise SandboxError(f"{path}: no signing key; `parl task check` makes one")
        _write_new(path, Ed25519PrivateKey.generate().private_bytes_raw())
    if path.stat().st_mode & 0o077:
        raise SandboxError(f"{path}: can be read by other users; chmod 600 it or make a new one")
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    except ValueError as error:
        raise SandboxError(
            f"{path}: is not a signing key ({error}); move it away, the next check makes a new one"
        ) from error


def _write_new(path: Path, secret: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return  # another check was first; its key is ours too
    with os.fdopen(fd, "w") as file:
        file.write(secret.hex() + "\n")


def public_hex(key: Ed25519PrivateKey) -> str:
    """64 hex digits."""
    return key.public_key().public_bytes_raw().hex()


def trusted_keys() -> set[str]:
    """Public keys whose certificates count; TaskError names the bad line."""
    keys: set[str] = set()
    if (config_dir() / KEY_FILE).exists():
        keys.add(public_hex(load_key(create=False)))
    path = config_dir() / TRUSTED_FILE
    if path.exists():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            text = line.partition("#")[0].strip().lower()
            if not text:
                continue
            if len(text) != 64 or set(text) - set("0123456789abcdef"):
                raise TaskError(f"{path}:{number}: {text[:20]!r}: expected 64 hex digits")
            keys.add(text)
    return keys


def signature_holds(public_key: str, signature: str, message: bytes) -> bool:
    """Whether ``signature`` (hex) over ``message`` was made with the key (hex)."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
