"""A tiny engine behind a real uvicorn in a process of its own.

python -m tests.contracts.mri_server light|scripted VERSION [weights folder]
prints its port, then serves until it is terminated.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.runtime.protocol import ModelRuntime
from engine.runtime.types import DrawKey

ROOT = Path(__file__).parents[2]


def scramble(tokens: Sequence[int], draw: DrawKey | None) -> int:
    sample = 0 if draw is None else draw.sample
    return (7 * sum(tokens[-3:]) + 5 * len(tokens) + sample) % 64


class ServerProcess:
    """The process and its address."""

    def __init__(self, kind: str, version: str = "1.1", weights: Path | None = None) -> None:
        command = [sys.executable, "-m", "tests.contracts.mri_server", kind, version]
        if weights is not None:
            command.append(str(weights))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def make_runtime(kind: str) -> ModelRuntime:
    if kind == "scripted":
        from engine.fakes import ScriptedRuntime

        return ScriptedRuntime(scramble, vocab_size=64, max_context=96)
    from tests.engine.tiny import make_engine

    return make_engine()


def main(kind: str, version: str, weights: str = "") -> None:
    import uvicorn

    from engine.server.mri import mri_app

    app = mri_app(
        make_runtime(kind), version=version, weights_root=Path(weights) if weights else None
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)  # noqa: T201
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
