"""TritonPythonModel: what Triton's Python backend runs; a LightEngine that answers MRI's verbs."""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from engine.adapters.loop_thread import LoopThread
from engine.adapters.service import MriService, unpack_weights
from engine.adapters.triton_export import ANSWER, CALL, TENSORS, read_engine
from engine.adapters.wire import encode_error
from engine.light.engine import LightEngine
from engine.runtime.protocol import MRI_VERSION
from engine.runtime.weights import make_weight_set

log = structlog.get_logger(__name__)


class TritonPythonModel:
    """``execute`` only starts calls; each answers through its sender when it is ready."""

    def initialize(self, args: dict[str, str]) -> None:
        import torch

        from engine.model.checkpoint.load import load_model

        version = Path(args["model_repository"]) / args["model_version"]
        torch.set_num_threads(1)
        model = load_model(version / "model", dtype=torch.float32)
        tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        weights = make_weight_set(0, tensors, model.config.model_dump(mode="json"))
        options = _vocabulary(version / "model")
        self._engine = LightEngine(
            model.config, read_engine(version), fetch_weights=lambda _: weights, **options
        )
        self._thread = LoopThread("triton-mri")
        self._service = MriService(self._engine)

    def execute(self, requests: list[Any]) -> None:
        import triton_python_backend_utils as pb

        for request in requests:
            call = pb.get_input_tensor_by_name(request, CALL).as_numpy()[0]
            tensors = pb.get_input_tensor_by_name(request, TENSORS)
            # copied: the request's memory is gone once this returns
            data = None if tensors is None else tensors.as_numpy().tobytes()
            answering = self._answer(request.get_response_sender(), bytes(call), data)
            asyncio.run_coroutine_threadsafe(answering, self._thread.loop)

    def finalize(self) -> None:
        self._thread.close()
        self._engine.close()

    async def _answer(self, sender: Any, call: bytes, tensors: bytes | None) -> None:
        import triton_python_backend_utils as pb

        try:
            async for item in self._items(call, tensors):
                text = json.dumps(item, separators=(",", ":")).encode()
                output = pb.Tensor(ANSWER, np.array([text], dtype=np.object_))
                sender.send(pb.InferenceResponse([output]))
        finally:
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _items(self, call: bytes, tensors: bytes | None) -> AsyncIterator[dict[str, Any]]:
        """Each with "result", "delta" or "error"."""
        try:
            asked = json.loads(call)
            verb, body = asked["verb"], asked["body"]
            if verb == "stream_step":
                async for item in self._service.stream(body):
                    yield item
            elif verb == "load_weights":
                weights = await asyncio.to_thread(unpack_weights, tensors or b"")
                yield {"result": await self._service.load_weights(weights)}
            else:
                spoken = str(asked.get("mri_version", MRI_VERSION))
                yield {"result": await self._service.call(verb, body, spoken)}
        except Exception as error:  # the caller must hear of it, or it waits for ever
            data = encode_error(error)
            if data["message"].endswith("see the log"):
                log.exception("mri_call_failed")
            yield {"error": data}


def _vocabulary(folder: Path) -> dict[str, Any]:
    """The vocabulary where the folder brings a tokenizer: stop texts and constraints need it."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    from engine.chat.load import load_tokenizer
    from engine.chat.vocabulary import Vocabulary

    return {"vocabulary": Vocabulary.of(load_tokenizer(folder))}
