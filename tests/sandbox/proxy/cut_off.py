"""Play a script of calls where there is no network: ``python cut_off.py FILE`` in a network
namespace of its own.

FILE is JSON: ``config`` of a ToolProxy with a world "w", ``script`` of [tool, arguments]. Prints
the tools and the results.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult

ROOT = Path(__file__).parents[3]


def without_network(command: list[str]) -> list[str]:
    """The command in a network namespace of its own, where even the loopback device is down."""
    return ["unshare", *(["-n"] if os.geteuid() == 0 else ["-r", "-n"]), "--", *command]


def play_cut_off(
    config: ProxyConfig, script: list[tuple[str, dict[str, Any]]], folder: Path
) -> tuple[list[str], list[ProxyResult]]:
    """Names of the tools and a result for each call, from a process without network."""
    file = folder / "cut_off.json"
    file.write_text(json.dumps({"config": config.model_dump(mode="json"), "script": script}))
    done = subprocess.run(
        without_network([sys.executable, __file__, str(file)]),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["tools"], [ProxyResult(**result) for result in told["results"]]


async def _play(config: ProxyConfig, script: list[list[Any]]) -> dict[str, Any]:
    proxy = ToolProxy(config)
    try:
        await proxy.start()
        token = (await proxy.open_episode("e", "w")).token
        tools = [spec.name for spec in proxy.tools(token)]
        results = [(await proxy.call(token, *call)).to_dict() for call in script]
        return {"tools": tools, "results": results}
    finally:
        await proxy.close()


def _main() -> None:
    for address in ("1.1.1.1", "127.0.0.1"):
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, 80)) == 101, "ENETUNREACH expected: is it cut off?"
    told = json.loads(Path(sys.argv[1]).read_text())
    config = ProxyConfig.model_validate(told["config"])
    print(json.dumps(asyncio.run(_play(config, told["script"]))))  # noqa: T201


if __name__ == "__main__":
    _main()
