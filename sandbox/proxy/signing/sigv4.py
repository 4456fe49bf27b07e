"""AWS Signature Version 4, header form.

Source: AWS General Reference, "Signature Version 4 signing process".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from sandbox.proxy.signing.base import Signable

_ALGORITHM = "AWS4-HMAC-SHA256"
_NOT_SIGNED = frozenset({"connection", "user-agent", "accept-encoding", "expect", "content-length"})


@dataclass(frozen=True, slots=True)
class SigV4:
    """Signer of one service in one region."""

    access_key_id: str
    secret_access_key: str
    region: str
    service: str
    session_token: str | None = None

    @staticmethod
    def from_options(
        secret: str, options: Mapping[str, str], look_up: Callable[[str], str]
    ) -> SigV4:
        """Options: region, service, access_key_id and session_token (names of secrets)."""
        missing = [key for key in ("region", "service", "access_key_id") if key not in options]
        if missing:
            raise ValueError(
                f"aws_sigv4 needs options region, service, access_key_id; no {missing}"
            )
        token = options.get("session_token")
        return SigV4(
            access_key_id=look_up(options["access_key_id"]),
            secret_access_key=secret,
            region=options["region"],
            service=options["service"],
            session_token=look_up(token) if token else None,
        )

    def sign(self, request: Signable, now: datetime) -> dict[str, str]:
        """x-amz-date, x-amz-content-sha256 for S3, x-amz-security-token, authorization."""
        stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        body_hash = hashlib.sha256(request.body).hexdigest()
        added = {"x-amz-date": stamp}
        if self.service == "s3":
            added["x-amz-content-sha256"] = body_hash
        if self.session_token:
            added["x-amz-security-token"] = self.session_token
        headers = {name.lower(): value for name, value in request.headers.items()}
        headers = {**headers, "host": request.host, **added}
        signed = sorted(name for name in headers if name not in _NOT_SIGNED)
        canonical = "\n".join(
            [
                request.method.upper(),
                self._path(request.path),
                _query(request.query),
                *(f"{name}:{' '.join(headers[name].split())}" for name in signed),
                "",
                ";".join(signed),
                body_hash,
            ]
        )
        scope = f"{stamp[:8]}/{self.region}/{self.service}/aws4_request"
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashed}"
        signature = hmac.new(self._key(stamp[:8]), to_sign.encode(), hashlib.sha256).hexdigest()
        added["authorization"] = (
            f"{_ALGORITHM} Credential={self.access_key_id}/{scope}, "
            f"SignedHeaders={';'.join(signed)}, Signature={signature}"
        )
        return added

    def _path(self, path: str) -> str:
        # S3 signs the path as sent, every other service encodes it once more
        return path or "/" if self.service == "s3" else quote(path or "/", safe="/~")

    def _key(self, date: str) -> bytes:
        key = b"AWS4" + self.secret_access_key.encode()
        for part in (date, self.region, self.service, "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key


def _query(pairs: tuple[tuple[str, str], ...]) -> str:
    encoded = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in encoded)
