"""The FastAPI application: two doors, health, and one shape for every error."""

from __future__ import annotations

import re

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from infra.errors import ParlError
from sandbox.server.agent import PREFIX as AGENT
from sandbox.server.agent import agent_router
from sandbox.server.body_limit import BodyLimit
from sandbox.server.door import errors, one_line
from sandbox.server.errors import describe
from sandbox.server.orchestrator import PREFIX as ORCHESTRATOR
from sandbox.server.orchestrator import orchestrator_router
from sandbox.server.service import SandboxService
from sandbox.server.tokens import digest
from sandbox.server.wire import AsciiJSON, Health

log = structlog.get_logger(__name__)
_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
_LOST = "the infrastructure failed; this episode has no reward"
_BUSY = "too busy now; try again later"
"""All an agent learns about it."""


def make_app(service: SandboxService, token: str) -> FastAPI:
    """The application of one server; ``token`` opens the orchestrator door. Whoever serves it
    starts and stops ``service``."""
    app = FastAPI(
        title="PARL sandbox server",
        version="1",
        description="Sessions of tool tasks in isolated boxes.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=AsciiJSON,
    )
    doors = (orchestrator_router(service, digest(token)), agent_router(service))
    for door in doors:
        app.include_router(door)
    _add_health(app, service)
    _add_errors(app, service, [route for router in (app, *doors) for route in router.routes])
    config = service.config
    app.add_middleware(
        BodyLimit,  # pyright: ignore[reportArgumentType] - its protocol wants app by position only
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
    )
    return app


def _add_health(app: FastAPI, service: SandboxService) -> None:
    @app.get("/healthz", response_model=Health, tags=["health"], summary="The process answers.")
    async def healthz() -> Response:
        return AsciiJSON({"status": "ok"})

    @app.get(
        "/readyz",
        response_model=Health,
        tags=["health"],
        responses=errors(503),
        summary="Sessions can be created (there may be no room at the moment).",
    )
    async def readyz() -> Response:
        if service.status != "ok":
            return _answer(503, "busy", f"the server is {service.status}", infra=True)
        return AsciiJSON({"status": service.status})


def _add_errors(app: FastAPI, service: SandboxService, routes: list[BaseRoute]) -> None:
    def refuse(request: Request, status: int, code: str, message: str, infra: bool) -> Response:
        path = request.url.path
        door = next((d.strip("/") for d in (AGENT, ORCHESTRATOR) if path.startswith(d)), "none")
        service.counts.refused(door, code, infra)
        if infra and door == "agent":
            message = _BUSY if status == 503 else _LOST
        return _answer(status, code, message, infra=infra)

    @app.exception_handler(ParlError)
    async def parl_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ParlError), error
        status, code, infra, retry_after_s = describe(error)
        if infra:
            log.warning("infra_error", path=request.url.path, code=code, error=str(error))
        response = refuse(request, status, code, str(error), infra)
        if retry_after_s is not None:
            response.headers["Retry-After"] = str(retry_after_s)
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), error
        return refuse(request, 422, "bad_request", one_line(error.errors()), False)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        code = _CODES.get(error.status_code, "http_error")
        response = refuse(request, error.status_code, code, str(error.detail), False)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(request, routes))
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # nothing above foresaw it, so nobody may be rewarded for it; uvicorn prints the traceback
        text = f"{type(error).__name__} in the server; see its log"
        response = refuse(request, 500, "internal", text, True)
        # the error goes on to uvicorn, which then drops the connection
        response.headers["Connection"] = "close"
        return response


def _methods(request: Request, routes: list[BaseRoute]) -> list[str]:
    """Every method of a path; the router itself names those of one route."""
    matching = [
        route
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for route in matching for method in route.methods or ()})


def _answer(status: int, code: str, message: str, *, infra: bool) -> Response:
    line = re.sub(r"\s+", " ", message).strip()
    return AsciiJSON({"error": code, "message": line, "infra": infra}, status_code=status)
