"""Certificate: this content passed this check, signed. Kept in the ledger and beside the task.

The file ``.parl/certificate.json`` travels with a folder and is no part of its content; it counts
only while the folder's hash is the certified one and the key is trusted here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.check.findings import CheckReport
from sandbox.check.keys import public_hex, signature_holds, trusted_keys
from sandbox.check.subject import OWN_FOLDER, content_hash
from sandbox.errors import TaskError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "parl-task-certificate-1"
FILE = "certificate.json"
MIN_REPEAT = 5
"""Episodes of oracle and nop each that a certificate rests on at least."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """``signature`` (hex, Ed25519) covers every other field. ``results``: step -> status."""

    name: str
    version: str
    content_hash: str
    report_hash: str
    task_ids: list[str]
    results: dict[str, str]
    flake: dict[str, Any]
    versions: dict[str, str]
    created_at: float
    public_key: str
    signature: str = ""
    format: str = FORMAT
    suggestions: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """sha256 of the signed message."""
        return hashlib.sha256(self.message()).hexdigest()

    def message(self) -> bytes:
        """What is signed: canonical JSON without the signature."""
        plain = asdict(self)
        del plain["signature"]
        return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def issue(report: CheckReport, key: Ed25519PrivateKey) -> Certificate:
    """TaskError when the report has an error or rests on fewer than MIN_REPEAT episodes."""
    few = too_few(report.flake)
    if report.passed and few is not None:
        raise TaskError(f"{report.target}: not certified: {few}")
    if not report.passed:
        raise TaskError(
            f"{report.target}: the check failed ({', '.join(sorted(report.rules))}); only a task "
            "that passes is certified"
        )
    plain = Certificate(
        name=report.name,
        version=report.version,
        content_hash=report.content_hash,
        report_hash=report.digest,
        task_ids=list(report.task_ids),
        results={step.name: step.status for step in report.steps},
        flake=dict(report.flake),
        versions=dict(report.versions),
        created_at=time.time(),
        public_key=public_hex(key),
        suggestions=dict(report.suggestions),
    )
    return Certificate(**{**asdict(plain), "signature": key.sign(plain.message()).hex()})


def too_few(flake: dict[str, Any]) -> str | None:
    """Why a report's or certificate's flake rate rests on too few episodes, or None."""
    repeat = flake.get("repeat", flake.get("trials", 0) // 2)  # version 2 told only the sum
    if repeat >= MIN_REPEAT:
        return None
    return f"--repeat {repeat} plays too few episodes, a certificate needs {MIN_REPEAT}"


def problem_of(certificate: Certificate, wanted_hash: str) -> str | None:
    """Why the certificate does not hold for content of this hash, or None."""
    if certificate.format != FORMAT:
        return f"is of format {certificate.format!r}, expected {FORMAT!r}"
    if not signature_holds(certificate.public_key, certificate.signature, certificate.message()):
        return "has a signature that does not match; it was changed after it was signed"
    if certificate.content_hash != wanted_hash:
        return (
            f"is for content {certificate.content_hash[:12]}, the task now has {wanted_hash[:12]}"
        )
    if certificate.public_key not in trusted_keys():
        return (
            f"is signed with key {certificate.public_key[:16]}..., which is not trusted here; add "
            "it to trusted_keys in the configuration folder"
        )
    if "fail" in certificate.results.values():
        return "certifies a check that failed"
    few = too_few(certificate.flake)
    if few is not None:
        return f"rests on too little: {few}"
    return None


def write_certificate(folder: Path, certificate: Certificate) -> Path:
    """``.parl/certificate.json`` in the task folder, replaced in one step."""
    path = folder / OWN_FOLDER / FILE
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(certificate), indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return path


def read_certificate(folder: Path) -> Certificate | None:
    """The folder's certificate, not yet checked; None when there is none."""
    path = folder / OWN_FOLDER / FILE
    if not path.is_file():
        return None
    return certificate_from(path.read_text("utf-8", "replace"), str(path))


def certificate_from(text: str, where: str) -> Certificate:
    """TaskError when the text is no certificate."""
    try:
        return Certificate(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise TaskError(f"{where}: is no certificate ({error}); check the task again") from error


def require_certificate(folder: Path) -> Certificate:
    """The valid certificate of a folder; TaskError says what is wrong and what to do."""
    certificate = read_certificate(folder)
    fix = f"run `parl task check {folder}`"
    if certificate is None:
        raise TaskError(
            f"{folder}: has no certificate, so nobody knows that its reward means anything; {fix} "
            "(or set tasks.allow_uncertified = true)"
        )
    problem = problem_of(certificate, content_hash(folder))
    if problem is not None:
        raise TaskError(f"{folder}: its certificate {problem}; {fix}")
    return certificate
