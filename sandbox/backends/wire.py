"""Host side of a box's stream: length-prefixed JSON, usable from any event loop.

Nothing here belongs to a loop: every wait names the loop it runs in, so a box may be opened in one
loop and used in another.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, Protocol

FRAME_LIMIT = 8 << 20
"""Longest reply; a box that announces more is broken."""
_CHUNK = 1 << 18

BOOTSTRAP = (
    "import os,sys\n"
    "fds=[int(a) for a in sys.argv[1:3]]\n"
    "def take(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  c=os.read(fds[0],n-len(b))\n"
    "  if not c:sys.exit(3)\n"
    "  b+=c\n"
    " return b\n"
    "g={'__name__':'agent'}\n"
    "exec(compile(take(int.from_bytes(take(4),'big')),'<agent>','exec'),g)\n"
    "g['main'](*fds)\n"
)
"""``python3 -I -S -B -c BOOTSTRAP IN OUT``: reads the agent's source from descriptor IN, so no file
of ours is visible in the box and every backend starts the same way; answers go to OUT (which may be
the same socket)."""


def agent_source() -> bytes:
    """Text of the in-box agent."""
    return (Path(__file__).parent / "agent.py").read_bytes()


def toolkit_source() -> str:
    """Text of ``sandbox.toolkit``, registered in the box under the same name."""
    return (Path(__file__).parents[1] / "toolkit.py").read_text(encoding="utf-8")


def files_source() -> str:
    """Text of ``agent_files``, the agent's other half."""
    return (Path(__file__).parent / "agent_files.py").read_text(encoding="utf-8")


class Channel(Protocol):
    """A byte stream to the agent."""

    async def send(self, data: bytes) -> None:
        """OSError when the other side is gone."""
        ...

    async def exactly(self, size: int) -> bytes:
        """EOFError at the end of the stream."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """A socket of ours, non-blocking from here on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def send(self, data: bytes) -> None:
        """See ``Channel``."""
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def exactly(self, size: int) -> bytes:
        """See ``Channel``."""
        data = bytearray()
        while len(data) < size:
            data += await self._some(min(size - len(data), _CHUNK))
        return bytes(data)

    async def _some(self, most: int) -> bytes:
        chunk = await asyncio.get_running_loop().sock_recv(self._sock, most)
        if not chunk:
            raise EOFError("the box closed its stream")
        return chunk

    def close(self) -> None:
        """Twice is fine."""
        self._sock.close()


async def send_frame(channel: Channel, payload: bytes) -> None:
    """Write one frame; OSError when the other side is gone."""
    await channel.send(len(payload).to_bytes(4, "big") + payload)


async def receive_frame(channel: Channel) -> bytes:
    """Read one frame; EOFError at the end of the stream, ValueError above FRAME_LIMIT."""
    size = int.from_bytes(await channel.exactly(4), "big")
    if size > FRAME_LIMIT:
        raise ValueError(f"reply of {size} bytes; at most {FRAME_LIMIT}")
    return await channel.exactly(size)


async def receive_json(channel: Channel) -> dict[str, Any]:
    """Read one JSON object; the box is not trusted, so anything else is ValueError."""
    value = json.loads(await receive_frame(channel))
    if not isinstance(value, dict):
        raise ValueError(f"reply is a {type(value).__name__}, expected an object")
    return value
