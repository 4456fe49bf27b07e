"""McpUpstream: tools of an MCP server, over stdio or streamable HTTP, through the official SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sandbox.errors import BackendUnavailable
from sandbox.proxy.config import LimitsConfig, ToolConfig
from sandbox.proxy.config import McpUpstream as Config
from sandbox.proxy.effects import Hints, effect_of_hints
from sandbox.proxy.errors import CallFailure, McpFailed, ResponseTooLarge, Transient
from sandbox.proxy.result import Reply
from sandbox.proxy.scrub import Scrubber
from sandbox.proxy.upstreams.base import Prepared, SendContext, ToolListing
from sandbox.proxy.upstreams.mcp_transport import TransportFactory

if TYPE_CHECKING:
    from mcp import Client

_CLOSE_TIMEOUT_S = 15.0
_CONNECTION_CLOSED = -32000
_INVALID_PARAMS = (-32602, -32601, -32600)


class McpConnection:
    """One client session. A task of its own enters and leaves the SDK's contexts, which must
    happen in one task; calls may come from any."""

    def __init__(self, transport: TransportFactory, start_timeout_s: float) -> None:
        self._transport = transport
        self._start_timeout_s = start_timeout_s
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.ensure_future(self._own())

    @property
    def alive(self) -> bool:
        return not self._owner.done() and not self._stop.is_set()

    def lost(self) -> None:
        """The server hung up: leave the session, calls will find it dead."""
        self._stop.set()

    async def client(self) -> Client:
        """The connected client. McpFailed when the server does not start in time."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Leave the session and end the server; idempotent."""
        self._stop.set()
        if not self._ready.done():
            self._owner.cancel()  # nobody needs to see it start
        done, _ = await asyncio.wait({self._owner}, timeout=_CLOSE_TIMEOUT_S)
        if not done:
            self._owner.cancel()
            await asyncio.wait({self._owner})
        if self._ready.done():
            self._ready.exception()  # seen: nobody may have asked for the client

    async def _own(self) -> None:
        from mcp import Client

        try:
            async with asyncio.timeout(self._start_timeout_s) as starting:
                async with self._transport() as transport, Client(transport, cache=None) as client:
                    starting.reschedule(None)
                    self._ready.set_result(client)
                    await self._stop.wait()
        except (Exception, asyncio.CancelledError) as error:
            # a boundary: the SDK raises groups of whatever its tasks met
            if not self._ready.done():
                self._ready.set_exception(_start_failure(error))


def _start_failure(error: BaseException) -> CallFailure:
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    if isinstance(inner, CallFailure):
        return inner
    if isinstance(inner, BackendUnavailable):
        return McpFailed(str(inner))
    return McpFailed(f"the MCP server does not start ({type(inner).__name__})")


class McpUpstream:
    """Implements Upstream. With ``session = "episode"`` each episode has a server of its own; one
    that ends has lost its state, so later calls of the episode fail instead of starting anew."""

    kind = "mcp"

    def __init__(
        self,
        name: str,
        config: Config,
        transport: TransportFactory,
        limits: LimitsConfig,
        scrubber: Scrubber,
        key: Callable[[], str],
    ) -> None:
        """``key`` names the credential the server is reached with."""
        self._name = name
        self._config = config
        self._transport = transport
        self._limits = limits
        self._scrubber = scrubber
        self._key = key
        self._connections: dict[str, McpConnection] = {}
        self._listings: list[ToolListing] | None = None
        self._spare: McpConnection | None = None

    async def listings(self) -> list[ToolListing]:
        if self._listings is None:
            if self._config.session == "node":
                self._listings = await self._ask(await self._connection("node").client())
            else:
                connection = McpConnection(self._transport, self._config.start_timeout_s)
                try:
                    self._listings = await self._ask(await connection.client())
                except CallFailure:
                    await connection.close()
                    raise
                self._spare = connection  # nothing was called yet: the first episode may have it
        return self._listings

    async def _ask(self, client: Client) -> list[ToolListing]:
        from mcp.shared.exceptions import MCPError

        tools, cursor = [], None
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools.extend(page.tools)
                    cursor = page.next_cursor
                    if not cursor:
                        return [self._listing(tool) for tool in tools]
        except (MCPError, TimeoutError) as error:
            raise McpFailed(
                f"the MCP server does not list its tools: {type(error).__name__}"
            ) from None

    def _listing(self, tool: Any) -> ToolListing:
        declared = self._config.tools.get(tool.name, ToolConfig())
        sent = tool.annotations
        hints = (
            Hints()
            if sent is None
            else Hints(sent.read_only_hint, sent.destructive_hint, sent.idempotent_hint)
        )
        effect, idempotent = effect_of_hints(
            hints, declared.effect, declared.idempotent, self._config.trust_annotations
        )
        return ToolListing(
            name=tool.name,
            description=self._scrubber.text(tool.description or ""),
            schema=tool.input_schema,
            effect=effect,
            idempotent=idempotent,
        )

    def prepare(self, tool: str, arguments: dict[str, Any]) -> Prepared:
        return Prepared(tool, {"mcp": tool, "arguments": arguments}, self._key(), arguments)

    async def send(self, prepared: Prepared, context: SendContext) -> Reply:
        from mcp.shared.exceptions import MCPError
        from pydantic import ValidationError

        episode = "node" if self._config.session == "node" else context.episode
        connection = self._connection(episode)
        client = await connection.client()
        meta: Any = None
        if context.idempotency_header is not None:
            meta = {context.idempotency_header: context.idempotency_key}
        try:
            async with asyncio.timeout(context.timeout_s):
                result = await client.call_tool(prepared.tool, prepared.payload, meta=meta)
        except TimeoutError:
            failure = McpFailed(f"no answer within {context.timeout_s:g} s")
            raise Transient(failure, applied=True) from None
        except MCPError as error:
            if error.code in _INVALID_PARAMS:
                text = self._scrubber.text(error.message)[:2000]
                return Reply(text.encode("utf-8", "replace"), "text/plain", failed=True)
            if error.code == _CONNECTION_CLOSED:
                connection.lost()
            failure = McpFailed(f"the MCP server or its connection failed (code {error.code})")
            raise Transient(failure, applied=True) from None
        except ValidationError:
            failure = McpFailed("the MCP server's answer breaks the protocol")
            raise Transient(failure, applied=True) from None
        return self._reply(result)

    def _reply(self, result: Any) -> Reply:
        text, media_type = _text_of(result), "text/plain"
        if text is None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
            media_type = "application/json"
        body = self._scrubber.text(text).encode("utf-8", "replace")
        if len(body) > self._limits.max_body_bytes:
            raise ResponseTooLarge(f"the answer is over {self._limits.max_body_bytes} bytes")
        return Reply(body, media_type, failed=bool(result.is_error))

    def _connection(self, episode: str) -> McpConnection:
        connection = self._connections.get(episode)
        if connection is not None and not connection.alive and self._config.session == "episode":
            raise McpFailed("the episode's MCP server has ended and its state is lost")
        if connection is None or not connection.alive:
            spare, self._spare = self._spare, None
            connection = spare if spare is not None and spare.alive else None
            connection = connection or McpConnection(self._transport, self._config.start_timeout_s)
            self._connections[episode] = connection
        return connection

    async def open_episode(self, episode: str, data: dict[str, Any]) -> None:
        return None  # the server starts with the first call

    async def close_episode(self, episode: str) -> None:
        connection = self._connections.pop(episode, None)
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        connections = [*self._connections.values(), *([self._spare] if self._spare else [])]
        self._connections, self._spare = {}, None
        await asyncio.gather(*(connection.close() for connection in connections))


def _text_of(result: Any) -> str | None:
    """The content's text, or None where the structured content says it better: as JSON, which the
    text repeats, in parts for a list. A single string needs no JSON around it."""
    structured = result.structured_content
    only_text = all(block.type == "text" for block in result.content)
    if structured is not None and only_text and not result.is_error:
        inner = structured.get("result") if isinstance(structured, dict) else None
        if not (isinstance(inner, str) and len(structured) == 1):
            return None
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: Any) -> str:
    """Text of a content block; what is no text is named, not passed on."""
    if block.type == "text":
        return block.text
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return block.resource.text
    if block.type == "resource_link":
        return f"[link: {block.uri}]"
    kind = getattr(block, "mime_type", None) or block.type
    return f"[{kind} refused: not text]"
