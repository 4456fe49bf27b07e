"""PythonUpstream: functions of an author's file, in a process of their own without secrets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from sandbox.errors import BackendUnavailable, TaskError
from sandbox.proxy.boxes import Boxes, Start
from sandbox.proxy.config import PythonUpstream as Config
from sandbox.proxy.config import ToolConfig
from sandbox.proxy.errors import ProxyConfigError, SimulatorFailed, ToolFailed
from sandbox.proxy.result import Reply
from sandbox.proxy.upstreams.base import Prepared, SendContext, ToolListing
from sandbox.tool_schema import tools_from_source

_START_TIMEOUT_S = 30.0
_LINE_LIMIT = 64 << 20


class SimulatorProcess:
    """One process for a source file; requests are answered in any order."""

    def __init__(self, source: str, name: str, boxes: Boxes) -> None:
        self._source = source
        self._name = name
        self._boxes = boxes
        self._start: Start | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the guard; None while it does not run."""
        return self._process.pid if self._process is not None else None

    async def request(
        self, method: str, episode: str, timeout_s: float, **parameters: Any
    ) -> dict[str, Any]:
        """Answer with ``value`` or ``refused``. SimulatorFailed: crash, no answer in time (the
        thread of a plain function goes on), or the process died."""
        process = await self._running()
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._write(process, {"id": number, "method": method, "episode": episode, **parameters})
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise SimulatorFailed(f"no answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if "crash" in answer:
            raise SimulatorFailed(f"the tool's own code failed: {answer['crash']}")
        return answer

    async def close(self) -> None:
        """End the process and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # the guard kills the rest
        await process.wait()
        if self._reading is not None:
            await self._reading
        if self._start is not None:
            await asyncio.to_thread(self._start.swept)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            # answers end before the exit is noticed: a request in between would wait for nobody
            ended = self._reading is not None and self._reading.done()
            if self._process is None or self._process.returncode is not None or ended:
                start = self._start = await self._prepared()
                self._process = await asyncio.create_subprocess_exec(
                    *start.argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env=start.env,
                    start_new_session=True,
                    limit=_LINE_LIMIT,
                )
                if start.greeting:
                    self._send(self._process, start.greeting)
                self._write(self._process, self._source)
                self._reading = asyncio.ensure_future(self._read(self._process))
            return self._process

    async def _prepared(self) -> Start:
        try:  # the first box of a proxy is tried out before
            return await asyncio.to_thread(self._boxes.simulator, Path(self._name).name)
        except BackendUnavailable as error:
            raise SimulatorFailed(str(error)) from None

    def _write(self, process: asyncio.subprocess.Process, value: Any) -> None:
        self._send(process, json.dumps(value).encode() + b"\n")

    @staticmethod
    def _send(process: asyncio.subprocess.Process, data: bytes) -> None:
        assert process.stdin is not None, "started with pipes"
        try:
            process.stdin.write(data)
        except (BrokenPipeError, ConnectionResetError, RuntimeError):
            raise SimulatorFailed("the simulator's process has ended") from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "started with pipes"
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
        except (ValueError, KeyError, TypeError, RecursionError):
            # the author's code can write here too, lines of any length and kind
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SimulatorFailed("the simulator's process has ended"))


class PythonUpstream:
    """Implements Upstream over a SimulatorProcess. Also the simulator of another kind's tools."""

    kind = "python"

    def __init__(self, name: str, config: Config, boxes: Boxes) -> None:
        """ProxyConfigError when the file cannot be read or has no tools."""
        self._name = name
        self._config = config
        self._opened: dict[str, asyncio.Task[None]] = {}
        self._data: dict[str, dict[str, Any]] = {}
        try:
            source = config.source.read_text(encoding="utf-8")
            specs = tools_from_source(source, str(config.source), allow_async=True)
        except (OSError, UnicodeDecodeError, TaskError) as error:
            raise ProxyConfigError(f"upstreams.{name}: {error}") from None
        self._specs = {spec.name: spec for spec in specs}
        self.process = SimulatorProcess(source, str(config.source), boxes)

    @property
    def names(self) -> frozenset[str]:
        """Functions marked @tool."""
        return frozenset(self._specs)

    async def listings(self) -> list[ToolListing]:
        listings = []
        for spec in self._specs.values():
            declared = self._config.tools.get(spec.name, ToolConfig())
            effect = declared.effect or spec.effect
            repeatable = spec.idempotent or effect == "read"
            listings.append(
                ToolListing(
                    name=spec.name,
                    description=spec.description,
                    schema=spec.schema,
                    effect=effect,
                    idempotent=repeatable if declared.idempotent is None else declared.idempotent,
                )
            )
        return listings

    def prepare(self, tool: str, arguments: dict[str, Any]) -> Prepared:
        canonical = {"python": tool, "arguments": arguments}
        return Prepared(tool, canonical, f"upstream:{self._name}", arguments)

    async def send(self, prepared: Prepared, context: SendContext) -> Reply:
        await self._ensure_open(context.episode)
        answer = await self.process.request(
            "call",
            context.episode,
            context.timeout_s,
            tool=prepared.tool,
            arguments=prepared.payload,
        )
        if "refused" in answer:
            return Reply(str(answer["refused"]).encode(), "text/plain", failed=True)
        value = answer["value"]
        if isinstance(value, str):
            return Reply(value.encode("utf-8", "replace"), "text/plain")
        return Reply(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))

    async def open_episode(self, episode: str, data: dict[str, Any]) -> None:
        self._data[episode] = data  # its module is made with the first call

    async def _ensure_open(self, episode: str) -> None:
        """Open once, however many calls come first; a failed set-up fails every call."""
        if episode not in self._opened:
            data = self._data.get(episode, {})
            self._opened[episode] = asyncio.ensure_future(self._open(episode, data))
        await asyncio.shield(self._opened[episode])

    async def _open(self, episode: str, data: dict[str, Any]) -> None:
        answer = await self.process.request(
            "open", episode, _START_TIMEOUT_S, data={**self._config.data, **data}
        )
        if "refused" in answer:
            raise SimulatorFailed(f"setup refused: {answer['refused']}")

    async def close_episode(self, episode: str) -> None:
        self._data.pop(episode, None)
        if self._opened.pop(episode, None) is not None:
            with contextlib.suppress(SimulatorFailed):  # its state went with the process
                await self.process.request("close", episode, 5.0)

    async def close(self) -> None:
        self._opened.clear()
        await self.process.close()


def refusal_of(reply: Reply) -> ToolFailed:
    """What a reply with ``failed`` tells the model."""
    return ToolFailed(reply.body.decode("utf-8", "replace")[:2000])
