"""TCP ports of this machine: find a free one, find out who has a taken one."""

from __future__ import annotations

import socket
from pathlib import Path

_LISTEN = "0A"


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now (somebody may take it before you do)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def listener_of(port: int) -> str:
    """ "pid 12 (python)" of the process that listens on ``port``, else how to find it (Linux)."""
    inodes = {
        fields[9]
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        if table.exists()
        for fields in map(str.split, table.read_text().splitlines()[1:])
        if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) in wanted:
                process = link.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # closed or ended meanwhile, or belongs to another user
            continue
    return f"a process of another user, see `ss -ltnp sport = :{port}`"
