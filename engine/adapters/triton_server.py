"""TritonRuntime: MRI over KServe v2 (gRPC, tritonclient), and Triton's server as a process.

python -m engine.adapters.triton_server REPOSITORY serves one until it is terminated.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.adapters.client import WireRuntime
from engine.adapters.service import pack_weights
from engine.adapters.triton_export import ANSWER, CALL, MODEL, TENSORS
from engine.adapters.wire import decode_error
from engine.errors import ContextLost, EngineError, NotSupportedError
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.types import WeightSet

_FINAL = "triton_final_response"
ROOT = Path(__file__).parents[2]


class TritonRuntime(WireRuntime):
    """ModelRuntime and Streaming of the model ``parl_mri`` of a Triton server. One stream a call:
    the server answers whenever a call is done, whatever others wait for."""

    def __init__(self, address: str, *, timeout_s: float = 900.0) -> None:
        """``address``: host:port of the server's gRPC door."""
        super().__init__(f"mri-triton {address}")
        self._address = address
        self._timeout_s = timeout_s
        self._client: Any = None

    async def _send(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._one(verb, body)

    async def _send_weights(self, weights: WeightSet) -> dict[str, Any]:
        data = await asyncio.to_thread(pack_weights, weights)
        return await self._one("load_weights", {}, data)

    async def _probe(self) -> str:
        return str((await self._one("info", {}))["mri_version"])

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        ended = False
        try:
            async for item in self._items("stream_step", body, None):
                ended = ended or "delta" not in item
                yield item
        finally:
            if not ended:
                await self._give_up(body)

    async def _one(
        self, verb: str, body: Mapping[str, Any], tensors: bytes | None = None
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = [item async for item in self._items(verb, body, tensors)]
        except TimeoutError:
            raise EngineError(
                f"{verb}: {self._address} did not answer within {self._timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            if verb == "forward_step":
                await self._give_up(body)
            raise
        if not found:
            raise ContextLost(f"{verb}: {self._address} ended the call without an answer")
        if "error" in found[0]:
            raise decode_error(found[0]["error"])
        return found[0]["result"]

    async def _give_up(self, body: Mapping[str, Any]) -> None:
        """End a step whose caller left; Triton does not tell the model."""
        ctx = body["request"]["ctx"]
        await self._one("cancel", {"ctx": ctx, "step_id": body["step_id"]})

    async def _items(
        self, verb: str, body: Mapping[str, Any], tensors: bytes | None
    ) -> AsyncIterator[dict[str, Any]]:
        """What the model answers to one call."""
        import grpc
        from tritonclient.grpc.aio import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        if self._client is None:
            self._client = InferenceServerClient(self._address)
        inputs = _inputs(verb, body, tensors)

        async def request() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": MODEL, "inputs": inputs, "enable_empty_final_response": True}

        answers = self._client.stream_infer(request())
        try:
            async for result, error in answers:
                if error is not None:
                    raise self._broken(verb, error)
                response = result.get_response()
                output = result.as_numpy(ANSWER)
                if output is not None and len(output):
                    yield json.loads(output[0])
                if response.parameters[_FINAL].bool_param:
                    return
        except (InferenceServerException, grpc.RpcError) as error:
            raise self._broken(verb, error) from error
        finally:
            answers.cancel()

    def _broken(self, verb: str, error: Exception) -> EngineError:
        return ContextLost(
            f"{verb}: Triton at {self._address}: {_reason(error)}; is the "
            "server running, and the model ready?"
        )


def _reason(error: Any) -> str:
    found = error.details() if callable(getattr(error, "details", None)) else str(error)
    return " ".join(str(found).split())[:200]


def _inputs(verb: str, body: Mapping[str, Any], tensors: bytes | None) -> list[Any]:
    from tritonclient.grpc import InferInput

    text = json.dumps({"verb": verb, "body": body, "mri_version": MRI_VERSION})
    call = InferInput(CALL, [1], "BYTES")
    call.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    if tensors is None:
        return [call]
    array = np.frombuffer(tensors, np.uint8)
    sent = InferInput(TENSORS, list(array.shape), "UINT8")
    sent.set_data_from_numpy(array)
    return [call, sent]


class TritonServer:
    """nvidia-pytriton's tritonserver over a model repository, on free ports of this machine."""

    def __init__(self, repository: Path, *, start_s: float = 900.0) -> None:
        """Returns when the model is ready. EngineError when it does not get there: within
        ``start_s``, generous because importing torch alone takes minutes on a busy machine."""
        binary, libraries, stub = _distribution()
        self._folder = Path(tempfile.mkdtemp(prefix="parl-triton-"))
        # the backend and the stub for this Python, side by side as the server wants them
        backends = self._folder / "backends"
        shutil.copytree(binary.parents[1] / "backends", backends)
        shutil.copy(stub, backends / "python" / "triton_python_backend_stub")
        self._log = self._folder / "server.log"
        grpc_port, http_port = _free_ports(2)
        self.address = f"127.0.0.1:{grpc_port}"
        command = [
            str(binary), f"--model-repository={repository}", f"--backend-directory={backends}",
            "--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}",
            "--http-address=127.0.0.1", f"--http-port={http_port}",
            "--allow-metrics=false", "--exit-on-error=true", "--log-verbose=0",
        ]  # fmt: skip
        paths = [str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))]
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(libraries),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._await_ready(http_port, start_s)

    def _await_ready(self, port: int, start_s: float) -> None:
        import http.client

        until = time.monotonic() + start_s
        while time.monotonic() < until and self.process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", f"/v2/models/{MODEL}/ready")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(0.5)
        lines = self._log.read_text().splitlines()
        tail = " | ".join([line for line in lines if "rror" in line][:4] or lines[-4:])
        self.close()
        raise EngineError(f"Triton did not get ready (waited up to {start_s:g} s): {tail}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _distribution() -> tuple[Path, Path, Path]:
    """(tritonserver, its libraries, the Python stub); NotSupportedError when it is not here."""
    import importlib.util

    found = importlib.util.find_spec("pytriton")
    if found is None or found.origin is None:
        raise NotSupportedError(
            "nvidia-pytriton is not installed here; scripts/engine-venvs.sh makes an environment"
        )
    package = Path(found.origin).parent
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise NotSupportedError(f"nvidia-pytriton has no stub for Python {version}: {stub}")
    return server / "bin" / "tritonserver", package.parent / "nvidia_pytriton.libs", stub


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()


def main(repository: str) -> None:
    server = TritonServer(Path(repository))
    print(f"MRI over KServe v2 at {server.address}", flush=True)  # noqa: T201
    try:
        server.process.wait()
    finally:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
