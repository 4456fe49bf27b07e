"""The node process: ``python -m sandbox.proxy --config proxy.toml [--set KEY=VALUE ...]``.

With ``--kill-switch on`` (or off) it turns the switch of the whole cluster and ends: the file's,
and where quotas are shared by Ray the actor's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config import load_config
from infra.errors import ParlError
from sandbox.proxy.config import ProxyConfig
from sandbox.proxy.errors import ProxyConfigError
from sandbox.proxy.server import RunningProxy, serve

if TYPE_CHECKING:
    from sandbox.actors import ClusterQuotas


async def _run(config: ProxyConfig) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[RunningProxy] = loop.create_future()
    quotas: ClusterQuotas | None = None
    if config.quotas.shared == "ray":
        from sandbox.actors import cluster_quotas

        quotas = await asyncio.to_thread(cluster_quotas)
    switch = None if quotas is None else quotas.killed
    serving = asyncio.ensure_future(serve(config, quotas=quotas, kill_switch=switch, ready=ready))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        found = ready.result()
        port = "" if found.loopback_port is None else f" 127.0.0.1:{found.loopback_port}"
        sys.stdout.write(f"ready {found.agent_socket} {found.control_socket}{port}\n")
        sys.stdout.flush()
    try:
        await serving
    except asyncio.CancelledError:
        return


async def _turn(config: ProxyConfig, on: bool) -> None:
    file = config.kill_switch_file
    if file is not None:
        file.touch() if on else file.unlink(missing_ok=True)
    if config.quotas.shared == "ray":
        from sandbox.actors import cluster_quotas

        quotas = await asyncio.to_thread(cluster_quotas)
        await quotas.set_kill_switch(on)
    elif file is None:
        raise ProxyConfigError(
            "--kill-switch: this configuration names no switch that others see; set "
            'kill_switch_file, or quotas.shared = "ray"'
        )


def main() -> int:
    """Exit code 0 after SIGTERM or SIGINT, 1 or 2 with one line on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.proxy", description=__doc__)
    parser.add_argument("--config", type=Path, action="append", default=[], help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--log-level", default="WARNING")
    parser.add_argument("--kill-switch", choices=("on", "off"), help="turn it and end")
    options = parser.parse_args()
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr)
    try:
        config = load_config(ProxyConfig, options.config, options.overrides)
        if options.kill_switch is not None:
            asyncio.run(_turn(config, options.kill_switch == "on"))
        else:
            asyncio.run(_run(config))
    except ParlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
