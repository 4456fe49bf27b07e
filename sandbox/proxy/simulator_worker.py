"""Process that runs an author's Python tools: JSON lines in, JSON lines out.

Every episode has a module namespace and a working directory of its own. ``async def`` tools run
side by side; plain functions run in threads. Requests: open, call, close. Answers carry the
request's id and either ``value``, ``refused`` (ToolError) or ``crash``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sandbox.toolkit import TaskModule, ToolError

_NUM_THREADS = 128
"""Plain functions at a time; more of them wait for a thread, coroutines never do."""


class EpisodeModule(TaskModule):
    """A module whose tools may be coroutines and whose answers keep their JSON type."""

    async def answer(self, workdir: Path, tool: str, arguments: dict[str, Any]) -> Any:
        """Value of a tool; whatever it raises comes through."""
        function = self._module.__dict__.get(tool)
        if function is None or "parl_tool" not in getattr(function, "__dict__", {}):
            raise ToolError(f"{tool} is not a tool of this task")
        if inspect.iscoroutinefunction(function):
            # the task copies the context, and with it workdir()
            def start(**keywords: Any) -> asyncio.Task[Any]:
                return asyncio.ensure_future(function(**keywords))

            return await self._run(workdir, start, arguments)
        return await asyncio.to_thread(self._run, workdir, function, arguments)


class Worker:
    """Episodes by id."""

    def __init__(self, source: str, name: str, directory: Path) -> None:
        self._source = source
        self._name = name
        self._directory = directory
        self._episodes: dict[str, tuple[EpisodeModule, Path]] = {}

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of one request; an exception of the author's code is an answer too."""
        try:
            return {"id": request["id"], "value": await self._do(request)}
        except ToolError as refusal:
            return {"id": request["id"], "refused": str(refusal)[:1000]}
        except Exception as error:
            return {"id": request["id"], "crash": f"{type(error).__name__}: {error}"[:500]}

    async def _do(self, request: dict[str, Any]) -> Any:
        episode = request["episode"]
        if request["method"] == "open":
            workdir = Path(tempfile.mkdtemp(dir=self._directory))
            module = EpisodeModule(self._source, self._name)
            await asyncio.to_thread(module.setup, workdir, request["data"])
            self._episodes[episode] = (module, workdir)
            return None
        if request["method"] == "close":
            closed = self._episodes.pop(episode, None)
            if closed is not None:
                await asyncio.to_thread(shutil.rmtree, closed[1], ignore_errors=True)
            return None
        if episode not in self._episodes:
            raise LookupError("the episode's state is gone")
        module, workdir = self._episodes[episode]
        return await module.answer(workdir, request["tool"], request["arguments"])


async def serve(source: str, name: str, directory: Path, descriptor: int) -> None:
    """Read requests from stdin until it ends; answers go to ``descriptor``."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
    reader = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    worker = Worker(source, name, directory)
    running: set[asyncio.Task[None]] = set()

    async def one(line: bytes) -> None:
        answer = await worker.handle(json.loads(line))
        try:
            text = json.dumps(answer, allow_nan=False)
        except (TypeError, ValueError) as error:
            text = json.dumps({"id": answer["id"], "crash": f"the answer is no JSON: {error}"})
        data = (text + "\n").encode()
        while data:
            data = data[os.write(descriptor, data) :]

    while line := await reader.readline():
        task = asyncio.ensure_future(one(line))
        running.add(task)
        task.add_done_callback(running.discard)


def _first_line(descriptor: int) -> bytes:
    """Read byte by byte: what follows is asyncio's to read."""
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"\n", b""):
        line += byte
    return bytes(line)


def main() -> None:
    """Arguments: the source file's name for tracebacks; the first line of stdin is the source."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the author prints must not mix with answers
    source = json.loads(_first_line(0))
    directory = Path(tempfile.mkdtemp(prefix="parl-simulator-"))
    try:
        asyncio.run(serve(source, sys.argv[1], directory, answers))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)  # a tool that hangs in a thread must not keep the process


if __name__ == "__main__":
    main()
