"""Request signatures, one file a scheme. ``SIGNERS`` is open: a plug-in adds its own entry."""

from __future__ import annotations

from sandbox.proxy.signing.base import Signable, Signer, SignerFactory
from sandbox.proxy.signing.sigv4 import SigV4

SIGNERS: dict[str, SignerFactory] = {"aws_sigv4": SigV4.from_options}

__all__ = ["SIGNERS", "SigV4", "Signable", "Signer", "SignerFactory"]
