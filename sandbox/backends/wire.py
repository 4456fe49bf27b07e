"""Host side of a box's socket: length-prefixed JSON, usable from any event loop.

Nothing here belongs to a loop: every wait names the loop it runs in, so a box may be opened in one
loop and used in another.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

FRAME_LIMIT = 8 << 20
"""Longest reply; a box that announces more is broken."""

BOOTSTRAP = (
    "import os,sys\n"
    "fd=int(sys.argv[1])\n"
    "def take(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  c=os.read(fd,n-len(b))\n"
    "  if not c:sys.exit(3)\n"
    "  b+=c\n"
    " return b\n"
    "g={'__name__':'agent'}\n"
    "exec(compile(take(int.from_bytes(take(4),'big')),'<agent>','exec'),g)\n"
    "g['main'](fd)\n"
)
"""``python3 -I -S -B -c BOOTSTRAP FD``: reads the agent's source from the socket, so no file of
ours is visible in the box and both backends start the same way."""


def agent_source() -> bytes:
    """Text of the in-box agent."""
    return (Path(__file__).parent / "agent.py").read_bytes()


def toolkit_source() -> str:
    """Text of ``sandbox.toolkit``, registered in the box under the same name."""
    return (Path(__file__).parents[1] / "toolkit.py").read_text(encoding="utf-8")


async def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Write one frame; OSError when the other side is gone."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, len(payload).to_bytes(4, "big") + payload)


async def receive_frame(sock: socket.socket) -> bytes:
    """Read one frame; EOFError at the end of the stream, ValueError above FRAME_LIMIT."""
    size = int.from_bytes(await _exactly(sock, 4), "big")
    if size > FRAME_LIMIT:
        raise ValueError(f"reply of {size} bytes; at most {FRAME_LIMIT}")
    return await _exactly(sock, size)


async def receive_json(sock: socket.socket) -> dict[str, Any]:
    """Read one JSON object; the box is not trusted, so anything else is ValueError."""
    value = json.loads(await receive_frame(sock))
    if not isinstance(value, dict):
        raise ValueError(f"reply is a {type(value).__name__}, expected an object")
    return value


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        chunk = await loop.sock_recv(sock, min(size - len(data), 1 << 18))
        if not chunk:
            raise EOFError("the box closed its socket")
        data += chunk
    return bytes(data)
