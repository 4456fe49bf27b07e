"""GET /v1/models, /health, /ready, /metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from fastapi.responses import JSONResponse

from engine.server.answers import Health, ModelCard, ModelList
from engine.server.documented import errors
from engine.server.errors import NotReady
from engine.server.service import Service

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def model_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"])

    async def card(name: str) -> dict[str, Any]:
        info = await service.runtime.info()
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "parl",
            "max_model_len": info.max_context,
            "weight_version": info.weight_version,
        }

    @router.get(
        "/models",
        response_model=ModelList,
        responses=errors(401, 500, 503),
        summary="What is served.",
    )
    async def list_models() -> Response:
        names = [service.config.name, *service.config.model.aliases]
        return JSONResponse({"object": "list", "data": [await card(name) for name in names]})

    @router.get(
        "/models/{model}",
        response_model=ModelCard,
        responses=errors(400, 401, 404, 500, 503),
        summary="One of them.",
    )
    async def get_model(
        model: Annotated[str, Path(max_length=200, pattern=r"^[A-Za-z0-9_.:@-]+$")],
    ) -> Response:
        service.check_model(model)
        return JSONResponse(await card(model))

    return router


def health_router(service: Service) -> APIRouter:
    """Routes without a key."""
    router = APIRouter(tags=["health"])

    @router.get("/health", response_model=Health, summary="The process answers.")
    async def health() -> Response:
        return JSONResponse({"status": service.status})

    @router.get(
        "/ready",
        response_model=Health,
        responses=errors(503),
        summary="Weights are loaded and warm; requests are taken.",
    )
    async def ready() -> Response:
        if service.status != "ok":
            raise NotReady(f"the server is {service.status}")
        # an engine that has ended says so
        await service.runtime.info()
        return JSONResponse({"status": service.status})

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        summary="For Prometheus.",
    )
    async def metrics() -> Response:
        return Response(await service.exposition(), media_type=EXPOSITION)

    return router
