"""SecretStore: credentials by name, where they may go, and putting them into requests.

The agent and the task's author name none of this: a secret is bound by the operator to host,
method and path, and put in after the access rule has let the request through.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sandbox.proxy.access import host_matches, method_matches, path_matches
from sandbox.proxy.config import BindingConfig, SecretConfig
from sandbox.proxy.errors import ProxyConfigError, SecretUnavailable
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.scrub import Scrubber
from sandbox.proxy.signing import SIGNERS, Signer

_COMMAND_TIMEOUT_S = 20.0


class SecretStore:
    """Resolves every secret once, at start, so that the scrubber knows all of them before the
    first call. ProxyConfigError names the secret and its source, never its value."""

    def __init__(self, secrets: Mapping[str, SecretConfig]) -> None:
        self._values = {name: _resolve(name, config) for name, config in secrets.items()}
        try:
            self.scrubber = Scrubber(self._values.values())
        except ValueError as error:
            short = [name for name, value in self._values.items() if len(value) < 8]
            raise ProxyConfigError(f"secrets.{short[0]}: {error}") from None
        self._bindings: list[tuple[str, BindingConfig, Signer | None]] = [
            (name, binding, self._signer(name, binding))
            for name, config in secrets.items()
            for binding in config.bind
        ]

    def names_for(self, request: HttpRequest) -> tuple[str, ...]:
        """Secrets that this request would carry, sorted; the key of the upstream-key quota."""
        return tuple(sorted({name for name, _, _ in self._matching(request)}))

    def inject(self, request: HttpRequest) -> tuple[HttpRequest, Scrubber]:
        """The request with its secrets and a scrubber that also knows what was put in.

        SecretUnavailable when two secrets want the same place, TLS is missing or the body has no
        room for the field.
        """
        matching = self._matching(request)
        taken: set[tuple[str, str]] = set()
        put_in: list[str] = []
        for name, binding, _ in matching:
            place = (binding.place, binding.name.lower() if binding.place != "sign" else "")
            if place in taken:
                raise SecretUnavailable(
                    f"two secrets are bound to the same {binding.place} of this request; "
                    "narrow the host, methods or path of one binding"
                )
            taken.add(place)
            if request.scheme != "https" and not binding.allow_plain_http:
                raise SecretUnavailable(
                    f"secret {name} is sent over TLS only; set allow_plain_http on its binding"
                )
            if binding.place != "sign":
                value = binding.format.replace("{secret}", self._values[name])
                put_in.append(value)
                request = _placed(request, binding, value)
        for _, _, signer in matching:
            if signer is not None:  # last: a signature covers everything else
                for header, value in signer.sign(request.signable(), datetime.now(UTC)).items():
                    put_in.append(value.rpartition("Signature=")[2])
                    request = request.with_header(header, value)
        return request, self.scrubber.with_values(put_in)

    def env_of(self, command: str) -> dict[str, str]:
        """Environment variables bound to an MCP command."""
        base = Path(command).name
        return {
            binding.name: binding.format.replace("{secret}", self._values[name])
            for name, binding, _ in self._bindings
            if binding.place == "env" and binding.host == base
        }

    def _matching(self, request: HttpRequest) -> list[tuple[str, BindingConfig, Signer | None]]:
        return [
            (name, binding, signer)
            for name, binding, signer in self._bindings
            if binding.place != "env"
            and host_matches(binding.host, request.host)
            and method_matches(binding.methods, request.method)
            and path_matches(binding.path, request.path)
        ]

    def _signer(self, name: str, binding: BindingConfig) -> Signer | None:
        if binding.signer is None:
            return None
        factory = SIGNERS.get(binding.signer.scheme)
        if factory is None:
            raise ProxyConfigError(
                f"secrets.{name}: unknown signature scheme {binding.signer.scheme!r}; "
                f"known: {', '.join(sorted(SIGNERS))}"
            )
        try:
            return factory(self._values[name], binding.signer.options, self._look_up)
        except ValueError as error:
            raise ProxyConfigError(f"secrets.{name}: {error}") from None

    def _look_up(self, name: str) -> str:
        if name not in self._values:
            raise ValueError(f"no secret {name!r}; known: {', '.join(sorted(self._values))}")
        return self._values[name]


def _placed(request: HttpRequest, binding: BindingConfig, value: str) -> HttpRequest:
    if binding.place == "header":
        return request.with_header(binding.name, value)
    if binding.place == "query":
        return request.with_query(binding.name, value)
    try:
        return request.with_body_field(binding.name, value)
    except ValueError as error:
        raise SecretUnavailable(str(error)) from None


def _resolve(name: str, config: SecretConfig) -> str:
    if config.env is not None:
        value = os.environ.get(config.env)
        if value is None:
            raise ProxyConfigError(f"secrets.{name}: environment variable {config.env} is not set")
    elif config.file is not None:
        try:
            value = config.file.expanduser().read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ProxyConfigError(f"secrets.{name}: {config.file}: {error}") from None
    else:
        assert config.command is not None, "SecretConfig has exactly one source"
        value = _output_of(name, config.command)
    if not value or not value.isprintable():
        raise ProxyConfigError(
            f"secrets.{name}: expected one line of printable text, found "
            f"{'nothing' if not value else 'control characters'}"
        )
    return value


def _output_of(name: str, command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        # the error's text would hold arguments, which may hold a secret
        raise ProxyConfigError(
            f"secrets.{name}: command {command[0]} did not run: {type(error).__name__}"
        ) from None
    if done.returncode != 0:
        raise ProxyConfigError(
            f"secrets.{name}: command {command[0]} ended with exit code {done.returncode}"
        )
    return done.stdout.rstrip("\r\n")
