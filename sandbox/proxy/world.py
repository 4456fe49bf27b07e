"""World: the tools of one task, ready to be called."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sandbox.calls.schema import CompiledSchema
from sandbox.errors import TaskError
from sandbox.proxy.cassette import Cassette
from sandbox.proxy.config import Mode, ToolConfig, UpstreamConfig
from sandbox.proxy.config import PythonUpstream as PythonConfig
from sandbox.proxy.errors import BadArguments, CassetteMiss, ProxyConfigError, UnknownTool
from sandbox.proxy.upstreams.base import ToolListing, Upstream
from sandbox.proxy.upstreams.openapi_load import refuse_outside_references
from sandbox.proxy.upstreams.simulator import PythonUpstream
from sandbox.tool_spec import ToolSpec


@dataclass(frozen=True)
class Source:
    """An upstream of a world with everything its tools share."""

    name: str
    config: UpstreamConfig
    upstream: Upstream
    cassette: Cassette | None
    simulator: PythonUpstream | None

    def simulates(self, tool: str) -> bool:
        return self.simulator is not None and tool in self.simulator.names


@dataclass(frozen=True)
class WorldTool:
    """``spec`` is what the model sees; ``listed`` the upstream's own name of the tool."""

    spec: ToolSpec
    listed: str
    mode: Mode
    config: ToolConfig
    source: Source

    @cached_property
    def _schema(self) -> CompiledSchema:
        return CompiledSchema(self.spec.schema, self.spec.name)

    def compile(self) -> None:
        """ProxyConfigError when the schema is none."""
        try:
            _ = self._schema
        except TaskError as error:
            raise ProxyConfigError(str(error)) from None

    def check(self, arguments: dict[str, Any]) -> None:
        """BadArguments names the first key that does not fit the schema."""
        problem = self._schema.problem(arguments)
        if problem is not None:
            raise BadArguments(problem)


@dataclass
class World:
    """Tools by the name the model uses."""

    name: str
    sources: dict[str, Source]
    tools: dict[str, WorldTool] = field(default_factory=dict)

    def tool(self, name: str) -> WorldTool:
        """UnknownTool lists what there is; names are never matched by distance."""
        if name not in self.tools:
            raise UnknownTool(f"no tool {name!r}; there are: {', '.join(sorted(self.tools))}")
        return self.tools[name]

    def cassette_digests(self) -> dict[str, str]:
        """Upstream -> digest of its cassette, for the rollout's record."""
        return {
            name: source.cassette.digest
            for name, source in self.sources.items()
            if source.cassette is not None
        }

    async def close(self) -> None:
        for source in self.sources.values():
            await source.upstream.close()
            if source.simulator is not None:
                await source.simulator.close()
            if source.cassette is not None:
                source.cassette.close()


async def load_tools(world: World, default_mode: Mode, killed: bool = False) -> None:
    """Fill ``world.tools``. Upstreams that only replay are not asked, none while the kill switch
    is on (``killed``): their tools stand on the cassette. ProxyConfigError: a name twice, an
    override of a tool that does not exist, a mode that lacks its cassette or simulator."""
    for source in world.sources.values():
        config = source.config
        listings = {
            listing.name: listing for listing in await _listings(source, default_mode, killed)
        }
        unknown = (set(config.tools) | set(config.include) | set(config.exclude)) - set(listings)
        if unknown:
            raise ProxyConfigError(
                f"worlds.{world.name}.upstreams.{source.name}: no tool {sorted(unknown)[0]!r}; "
                f"there are: {', '.join(sorted(listings)) or 'none'}"
            )
        for name, listing in listings.items():
            if (config.include and name not in config.include) or name in config.exclude:
                continue
            declared = config.tools.get(name, ToolConfig())
            mode: Mode = declared.mode or config.mode or _default(source, default_mode)
            _check_mode(world, source, name, mode)
            # a server may send any schema; checking arguments must not read what it points to
            refuse_outside_references(listing.schema)
            tool = WorldTool(_spec(listing, declared), name, mode, declared, source)
            tool.compile()
            if tool.spec.name in world.tools:
                raise ProxyConfigError(
                    f"worlds.{world.name}: two tools are named {tool.spec.name!r}; rename one with "
                    f"upstreams.{source.name}.tools.{name}.name"
                )
            world.tools[tool.spec.name] = tool


def _default(source: Source, default_mode: Mode) -> Mode:
    # the author's Python is a simulator to begin with
    return "simulate" if isinstance(source.config, PythonConfig) else default_mode


def _modes(source: Source, default_mode: Mode) -> set[str]:
    config = source.config
    own = config.mode or _default(source, default_mode)
    return {own, *(tool.mode for tool in config.tools.values() if tool.mode is not None)}


async def _listings(source: Source, default_mode: Mode, killed: bool) -> list[ToolListing]:
    upstream, cassette, name = source.upstream, source.cassette, source.name
    reaches = not killed and _modes(source, default_mode) & {"record", "live", "live_read"}
    if upstream.kind != "mcp" or reaches:
        listings = await upstream.listings()
        recording = "record" in _modes(source, default_mode)
        if upstream.kind == "mcp" and cassette is not None and recording:
            cassette.record_tools(name, [listing.to_dict() for listing in listings])
        return listings
    recorded = cassette.tools(name) if cassette is not None else None
    if recorded is not None:
        return [ToolListing(**record) for record in recorded]
    if source.simulator is not None:
        return await source.simulator.listings()
    raise CassetteMiss(
        f"upstreams.{name}: no tools on the cassette "
        f"{cassette.path if cassette else '(none is set)'}; record it first"
    )


def _check_mode(world: World, source: Source, tool: str, mode: Mode) -> None:
    place = f"worlds.{world.name}.upstreams.{source.name}: tool {tool!r} has mode {mode!r} but "
    if mode in ("replay", "record") and source.cassette is None:
        raise ProxyConfigError(place + "no cassette is set")
    if mode == "simulate" and source.upstream.kind != "python" and not source.simulates(tool):
        raise ProxyConfigError(place + "the simulator has no function of that name")


def _spec(listing: ToolListing, declared: ToolConfig) -> ToolSpec:
    spec = ToolSpec(
        name=declared.name or listing.name,
        description=listing.description if declared.description is None else declared.description,
        schema=listing.schema,
        effect=listing.effect,  # pyright: ignore[reportArgumentType]  (checked by pydantic)
        idempotent=listing.idempotent,
    )
    return replace(spec, rate=declared.rate.rate_per_s) if declared.rate else spec
