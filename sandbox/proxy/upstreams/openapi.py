"""OpenApiUpstream: operations of an OpenAPI document as tools."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from sandbox.proxy.access import allowed, path_matches
from sandbox.proxy.config import AccessRule, ToolConfig
from sandbox.proxy.config import OpenApiUpstream as Config
from sandbox.proxy.effects import effect_of_verb
from sandbox.proxy.errors import AccessDenied, ProxyConfigError
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.result import Reply
from sandbox.proxy.secrets import SecretStore
from sandbox.proxy.upstreams.base import Prepared, SendContext, ToolListing
from sandbox.proxy.upstreams.http import HttpSender
from sandbox.proxy.upstreams.openapi_document import Operation, read_document
from sandbox.proxy.upstreams.openapi_request import build_request

_EVERYTHING = AccessRule(methods=("*",))


class OpenApiUpstream:
    """Implements Upstream. A request must be an offered operation on the document's server; the
    author's ``allow`` and ``deny`` narrow that further."""

    kind = "openapi"

    def __init__(self, name: str, config: Config, secrets: SecretStore, sender: HttpSender) -> None:
        """ProxyConfigError: a bad document, no usable server URL."""
        self._name = name
        self._config = config
        self._secrets = secrets
        self._sender = sender
        document = read_document(config.document)
        self.skipped = document.skipped
        """Operations that cannot become tools, with reasons."""
        url = config.server_url or document.server_url
        self._server = urlsplit(url or "")
        if self._server.scheme not in ("http", "https") or not self._server.hostname:
            raise ProxyConfigError(
                f"upstreams.{name}: server {url!r}; expected an http(s) URL; set server_url"
            )
        if self._server.username or self._server.password:
            raise ProxyConfigError(
                f"upstreams.{name}: server_url holds a credential; declare it as a secret"
            )
        self._operations = {operation.name: operation for operation in document.operations}
        base = self._server.path.rstrip("/")
        self._routes = [
            (operation.method, base + _glob(operation))
            for operation in document.operations
            if (not config.include or operation.name in config.include)
            and operation.name not in config.exclude
        ]

    async def listings(self) -> list[ToolListing]:
        return [self._listing(operation) for operation in self._operations.values()]

    def _listing(self, operation: Operation) -> ToolListing:
        declared = self._config.tools.get(operation.name, ToolConfig())
        effect, idempotent = effect_of_verb(operation.method, declared.effect, declared.idempotent)
        return ToolListing(
            name=operation.name,
            description=operation.description,
            schema=operation.schema,
            effect=effect,
            idempotent=idempotent,
        )

    def prepare(self, tool: str, arguments: dict[str, Any]) -> Prepared:
        request = build_request(
            self._operations[tool], self._server, arguments, self._config.headers
        )
        self._check(request)
        return Prepared(
            tool=tool,
            canonical=request.canonical(),
            key="+".join(self._secrets.names_for(request)) or f"upstream:{self._name}",
            payload=request,
        )

    async def send(self, prepared: Prepared, context: SendContext) -> Reply:
        request: HttpRequest = prepared.payload
        if context.idempotency_header is not None:
            request = request.with_header(context.idempotency_header, context.idempotency_key)
        return await self._sender.send(request, self._check, context.timeout_s)

    def _check(self, request: HttpRequest) -> None:
        config = self._config
        offered = any(
            method == request.method and path_matches(route, request.path)
            for method, route in self._routes
        )
        inside = request.host == (self._server.hostname or "").lower() and offered
        allow = config.allow or (_EVERYTHING,)
        if not inside or not allowed(
            allow, config.deny, request.method, request.host, request.path
        ):
            raise AccessDenied(f"{request.method} {request.path} is not allowed for this task")

    async def open_episode(self, episode: str, data: dict[str, Any]) -> None:
        return None

    async def close_episode(self, episode: str) -> None:
        return None

    async def close(self) -> None:
        return None


def _glob(operation: Operation) -> str:
    """Route as a glob: each {name} is one segment's worth."""
    parts = operation.path.split("{")
    return parts[0] + "".join("*" + part.partition("}")[2] for part in parts[1:])
