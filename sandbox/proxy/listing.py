"""The tools a task's proxy section declares, as the model sees them, without a running proxy."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sandbox.proxy.cassette import Cassette
from sandbox.proxy.config import Mode, ProxyConfig, ToolConfig, WorldConfig
from sandbox.proxy.declare import (
    ProxySpec,
    declared_files,
    mode_of,
    recording,
    without_servers,
    world_of_section,
)
from sandbox.proxy.scrub import Scrubber
from sandbox.tool_spec import ToolSpec


def proxied_tools(
    section: dict[str, Any], folder: Path, *, record: ProxyConfig | None = None
) -> tuple[ProxySpec, tuple[ToolSpec, ...]]:
    """The spec of a proxy section and its tools: from the OpenAPI document, the source of a
    simulator, or what an MCP server told when its cassette was recorded.

    ``record``: whatever has a cassette gets the mode record, and MCP servers, which are programs of
    the author's choice, are started and asked; their answer goes to the cassette. What reaches them
    is this node's: secrets, network, boxes. ProxyError; CassetteCorrupt before an episode meets it.
    """
    if record is not None:
        section = recording(section)
    world = world_of_section(section, folder)
    upstreams = {
        name: upstream.model_copy(update={"mode": mode_of(upstream)})
        for name, upstream in world.upstreams.items()
    }
    files = declared_files(section, folder)
    if record is None:
        for upstream in upstreams.values():
            if upstream.cassette is not None:
                Cassette(upstream.cassette, Scrubber()).check()
    asked = {
        name: upstream if record is not None else without_servers(name, upstream)
        for name, upstream in upstreams.items()
    }
    # load_task is called inside and outside of event loops
    with ThreadPoolExecutor(1, "parl-proxy-listing") as executor:
        listed = executor.submit(
            asyncio.run, _listed(WorldConfig(upstreams=asked), record)
        ).result()
    modes: dict[str, Mode] = {
        spec.name: upstreams[source].tools.get(name, ToolConfig()).mode
        or mode_of(upstreams[source])
        for source, name, spec in listed
    }
    tables = {
        name: {**table, "mode": mode_of(upstreams[name])}
        for name, table in section.get("upstreams", {}).items()
    }
    spec = ProxySpec(
        section={**section, "upstreams": tables}, folder=str(folder), modes=modes, files=files
    )
    return spec, tuple(tool for _, _, tool in listed)


async def _listed(world: WorldConfig, node: ProxyConfig | None) -> list[tuple[str, str, ToolSpec]]:
    """(upstream, its name of the tool, the tool)"""
    from sandbox.proxy.proxy import ToolProxy

    with tempfile.TemporaryDirectory(prefix="parl-listing-") as state:
        config = ProxyConfig(state_dir=Path(state))
        if node is not None:
            config = node.model_copy(update={"state_dir": Path(state), "worlds": {}})
        proxy = ToolProxy(config)
        try:
            loaded = await proxy.add_world("task", world)
            return [(tool.source.name, tool.listed, tool.spec) for tool in loaded.tools.values()]
        finally:
            await proxy.close()
