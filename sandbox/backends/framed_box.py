"""FramedBox: requests, deadlines and the end of a box, whatever isolates it.

A backend's box derives from it and says how its processes are ended (``_end``), what they said last
(``last_words``) and how the kernel's memory kills are counted.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from typing import Any

from sandbox.backends.base import Level, Reply
from sandbox.backends.printable import printable
from sandbox.backends.wire import Channel, agent_source, receive_json, send_frame
from sandbox.errors import SandboxError, SandboxLost, TaskError

_RESET_TIMEOUT_S = 10.0
_BROKEN = (OSError, EOFError, ValueError, KeyError, RecursionError)
"""Whatever a stream or a hostile reply can raise."""


class FramedBox:
    """Implements the requests of ``sandbox.backends.base.Box``, one at a time."""

    def __init__(self, box_id: str, level: Level, channel: Channel) -> None:
        self.box_id = box_id
        self.level = level
        self.enforced: dict[str, Any] = {}
        self._channel = channel
        self._busy = False
        self._killing: asyncio.Task[None] | None = None
        self._pristine: Any = None
        self._num_oom = 0

    @property
    def oom_kills(self) -> int:
        """Processes of this box the kernel killed for memory, as far as the level can tell."""
        return 0

    @property
    def worn(self) -> bool:
        """Too old to be lent again."""
        return False

    def note_end(self) -> None:
        """Called once a stream broke, before ``_end``: what only the dying box can tell."""

    def last_words(self) -> str:
        """Why the box ended, in one line; empty when unknown. May block for a moment."""
        return ""

    async def _end(self) -> None:
        """End every process and free what the box held."""
        raise NotImplementedError

    async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        """See ``Box.request``."""
        if self._busy:
            raise SandboxError(f"box {self.box_id}: {method} while another request is running")
        if self._killing is not None:
            raise SandboxLost(f"box {self.box_id}: {method} after its end")
        self._busy = True
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                payload = json.dumps({"method": method, "params": params}).encode()
                await send_frame(self._channel, payload)
                answer = await receive_json(self._channel)
            return self._reply(method, answer, time.perf_counter() - begin)
        except TimeoutError as error:
            await self.kill()
            raise SandboxLost(
                f"box {self.box_id}: {method} not answered within {timeout_s:g} s; killed"
            ) from error
        except _BROKEN as error:
            self.note_end()
            await self.kill()
            words = await asyncio.to_thread(self.last_words)
            raise SandboxLost(
                f"box {self.box_id}: {method}: {printable(str(error))} ({words}); killed"
            ) from error
        except asyncio.CancelledError:
            await self.kill()  # the reply is still on its way and would answer the next request
            raise
        finally:
            self._busy = False

    def _reply(self, method: str, answer: dict[str, Any], elapsed_s: float) -> Reply:
        """Control characters of a terminal do not leave the box in anything a person reads."""
        value, error = answer["value"], answer.get("error")
        if error not in (None, "tool_error", "timeout", "died", "crash"):
            raise ValueError(f"reply of an unknown kind {error!r:.40}")
        if error == "died" and self._num_oom < (num_oom := self.oom_kills):
            self._num_oom = num_oom
            value = "out of memory"
        if error == "crash":
            value = printable(str(value), most=300)
        elif error is not None or method == "call":
            value = printable(str(value), lines=True)
        elif method == "verify":
            value = _printable_verdict(value)
        return Reply(value, error, elapsed_s)

    async def reset(self) -> bool:
        """Kill the worker, empty the working directory, and compare with the state at birth."""
        reply = await self.request("reset", {}, _RESET_TIMEOUT_S)
        return reply.value == self._pristine

    async def kill(self) -> None:
        """End every process and free what the box held; goes on when the caller is cancelled."""
        if self._killing is None:
            self._channel.close()
            self._killing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._killing)

    async def greet(self, hello: dict[str, Any], timeout_s: float) -> None:
        """Feed the agent and the task's code. TaskError when that code does not load, SandboxLost
        with the box's last words when the agent does not come up."""
        try:
            async with asyncio.timeout(timeout_s):
                await send_frame(self._channel, agent_source())
                await send_frame(self._channel, json.dumps(hello).encode())
                self._pristine = (await receive_json(self._channel))["value"]
        except (TimeoutError, *_BROKEN) as error:
            await self.kill()
            words = await asyncio.to_thread(self.last_words)
            raise SandboxLost(f"box {self.box_id} did not start: {words or repr(error)}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if not isinstance(self._pristine, dict):
            await self.kill()
            raise TaskError(f"{hello['name']} does not load: {self._pristine!r:.300}")


def _printable_verdict(value: Any) -> Any:
    """A verifier quotes what an agent wrote, and its reasons end up in logs and reports. An integer
    that no float holds becomes infinity, which every check of a range refuses without raising."""
    if not isinstance(value, dict):
        return value
    changed: dict[str, Any] = {}
    if isinstance(reasons := value.get("reasons"), list):
        changed["reasons"] = [printable(str(reason), most=2000) for reason in reasons]
    if isinstance(number := value.get("correctness"), int) and abs(number) > sys.float_info.max:
        changed["correctness"] = math.inf
    return {**value, **changed}
