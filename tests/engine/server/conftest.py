"""A real server on a free port: in a thread for most tests, a process of its own for some."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from engine.chat.chatml import ChatMLRenderer
from engine.chat.kimi import K25Renderer
from engine.chat.tokenizers import ByteTokenizer
from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.server.app import create_app
from engine.server.config import ListenSection, ServeConfig
from engine.server.format import ChatFormat
from engine.server.keys import Keys
from engine.server.serve import open_port
from engine.server.service import Loaded, Service
from tests.engine.chat.dialogues import small_hf
from tests.engine.tiny import MODEL, make_weights

ROOT = Path(__file__).parents[3]
KEY = "key-of-the-tests-0123456789"
CONTEXT = 768
SHAPE = MODEL.model_dump() | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
}
ENGINE = EngineConfig(
    max_context=CONTEXT, num_blocks=1024, max_contexts=64, max_rows=96, deterministic=False
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 2]}},
            "required": ["key", "n"],
            "additionalProperties": False,
        },
    },
}


def loaded_tiny(kind: str = "kimi", engine: EngineConfig = ENGINE) -> Loaded:
    """A random model of one layer over bytes (kimi) or a small BPE (chatml)."""
    tokenizer = ByteTokenizer() if kind == "kimi" else small_hf(call_markers=False)
    shape = ModelConfig.model_validate(SHAPE | {"vocab_size": tokenizer.vocab_size})
    weights = make_weights(7, shape)
    vocabulary = Vocabulary.of(tokenizer)
    runtime = LightEngine(
        shape, engine, fetch_weights=lambda version: weights, vocabulary=vocabulary
    )
    if kind == "kimi":
        chat = ChatFormat(K25Renderer(tokenizer, False, None), K25Renderer(tokenizer, True, None))
    else:
        chat = ChatFormat(ChatMLRenderer(tokenizer))
    return Loaded(runtime, tokenizer, vocabulary, chat, runtime.close)


class LocalServer:
    """A Service behind uvicorn in a thread, and a client of it."""

    def __init__(self, service: Service, loaded: Loaded) -> None:
        self.service = service
        self.runtime = loaded.runtime
        self._listener = open_port(ListenSection(port=0))
        config = uvicorn.Config(
            create_app(service), log_config=None, access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(loaded,), daemon=True)
        self._thread.start()
        port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _run(self, loaded: Loaded) -> None:
        async def main() -> None:
            await self.service.start(loaded)
            await self._server.serve(sockets=[self._listener])

        asyncio.run(main())

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        self.service.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "tiny", **body})

    def chat(self, text: str = "hi", **body: Any) -> dict[str, Any]:
        """The answer; must be 200."""
        messages = body.pop("messages", [{"role": "user", "content": text}])
        answer = self.post("/v1/chat/completions", messages=messages, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any = "hi", **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        with self.client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as r:
            assert r.status_code == 200, r.read()
            assert r.headers["content-type"].startswith("text/event-stream")
            return events(r.iter_lines())

    def num_contexts(self) -> int:
        return asyncio.run(self.runtime.info()).num_contexts

    def metric(self, line: str) -> float:
        """Value of one line of the exposition; 0 when it is not there."""
        for text in self.client.get("/metrics").text.splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
        return 0.0


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Chunks of a stream of events that must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


@contextmanager
def local_server(
    kind: str = "kimi", keys: dict[str, str] | None = None, **sections: Any
) -> Iterator[LocalServer]:
    config = ServeConfig.model_validate(
        {"model": {"preset": "demo", "tokenizer": "bytes", "name": "tiny"}, **sections}
    )
    loaded = loaded_tiny(kind)
    server = LocalServer(Service(config, Keys(keys or {})), loaded)
    try:
        wait_for(lambda: server.service.status == "ok")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


@pytest.fixture(scope="module")
def chatml() -> Iterator[LocalServer]:
    with local_server("chatml") as server:
        yield server


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)


TINY = """
[model]
preset = "demo"
tokenizer = "bytes"
name = "tiny"
[listen]
port = 0
[limits]
default_max_tokens = 2
[engine]
max_context = 2048
num_blocks = 1024
max_contexts = 64
deterministic = false
"""


class ServerProcess:
    """``parl serve`` in a process of its own; ``text``: its configuration."""

    def __init__(
        self, folder: Path, *words: str, text: str = TINY, env: dict[str, str] | None = None
    ) -> None:
        config = folder / "serve.toml"
        config.write_text(text)
        self._log = folder / "serve.err"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parl.cli.main", "serve", "-c", str(config), *words],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                text=True,
            )
        assert self.process.stdout is not None
        listening = self.process.stdout.readline()
        assert listening.startswith("listening on http"), self.words
        self.url = listening.split()[2].rstrip(",")

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving"), f"{line!r}, stderr: {self.words}"

    @property
    def words(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()

    def stop(self, timeout_s: float = 60) -> int:
        """SIGTERM; exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all tests that do not end it; needs KEY."""
    folder = tmp_path_factory.mktemp("serve")
    server = ServerProcess(folder, env={"PARL_SERVE_KEYS": f"tests={KEY}"})
    server.until_ready()
    yield server
    if server.process.poll() is None:
        server.stop()
