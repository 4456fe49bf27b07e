"""create_app: the FastAPI application of one Service. Its routers are listed in ``_routers``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from engine.server.chat import chat_router
from engine.server.completions import completion_router
from engine.server.errors import ApiError, ErrorAnswer, answer_to
from engine.server.gate import Gate, record_of
from engine.server.models import health_router, model_router
from engine.server.service import Service
from engine.server.wire import ChatBody, CompletionBody
from infra.errors import ParlError

log = structlog.get_logger(__name__)
_FIELD = re.compile(r"[a-z_]+")
_SCHEME = HTTPBearer(scheme_name="key", auto_error=False)


def _routers(service: Service) -> list[APIRouter]:
    """Every router behind an API key; a further interface to the engine is one more line."""
    return [
        chat_router(service),
        completion_router(service),
        model_router(service),
    ]


def create_app(service: Service) -> FastAPI:
    """Whoever serves it loads the model (Service.start) and ends it (Service.close)."""
    app = FastAPI(
        title="PARL policy server",
        version="1",
        description="A policy behind OpenAI's interface.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    keyed = _routers(service)
    for router in keyed:
        # the gate asks for the key, before it reads the body; this is for the document
        app.include_router(router, dependencies=[Security(_SCHEME)])
    open_router = health_router(service)
    app.include_router(open_router)
    _add_errors(app, [route for router in (app, *keyed, open_router) for route in router.routes])
    app.add_middleware(Gate, service=service)
    _document(app, service)
    return app


def add_mri(app: FastAPI, service: Service) -> None:
    """The routes of MRI, which name the engine and so come when it is loaded; mri.enabled."""
    mri = service.config.mri
    if not mri.enabled:
        return
    from engine.server.mri import mri_router

    router = mri_router(
        service.runtime,
        weights_root=Path(mri.weights_root) if mri.weights_root else None,
        weights_allowed=mri.weights,
    )
    app.include_router(router, dependencies=[Security(_SCHEME)])
    app.openapi_schema = None


def _add_errors(app: FastAPI, routes: list[BaseRoute]) -> None:
    @app.exception_handler(ParlError)
    async def parl_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ParlError), error
        answer = answer_to(error)
        if answer.status >= 500 and not isinstance(error, ApiError):
            log.warning("failed", request_id=record_of(request.scope).id, error=str(error))
        return JSONResponse(answer.body(), answer.status, answer.headers())

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: Exception) -> Response:
        del request
        assert isinstance(error, RequestValidationError), error
        return JSONResponse(_first_problem(error.errors(), error.body).body(), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        status = error.status_code
        text = f"{request.method} {request.url.path}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
        answer = ErrorAnswer(status, text, "invalid_request_error", None, code)
        headers = dict(error.headers or {})
        if status == 405:
            headers["Allow"] = ", ".join(_methods(request, routes))
        return JSONResponse(answer.body(), status, headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # nothing foresaw it; uvicorn prints the traceback and drops the connection
        record_of(request.scope).outcome = "error"
        text = f"{type(error).__name__} in the server; see its log"
        answer = ErrorAnswer(500, text, "server_error", None, "internal")
        return JSONResponse(answer.body(), 500, {"Connection": "close"})


def _first_problem(problems: Any, body: Any) -> ErrorAnswer:
    """The first problem of a body, without the value (it may be a megabyte)."""
    first = problems[0]
    param = _place(first["loc"][1:], body)
    if first["type"] == "json_invalid":
        return _wrong(f"the body is not JSON: {first['ctx']['error']}", None)
    if first["type"] == "extra_forbidden":
        return _wrong(f"unknown parameter {param!r}", param)
    return _wrong(f"{param or 'body'}: {first['msg']}", param)


def _place(loc: Sequence[Any], body: Any) -> str | None:
    """Dotted name of a place in the body; pydantic's ``loc`` also names the arms of unions."""
    names: list[str] = []
    for part in loc:
        known = isinstance(body, dict) and part in body
        known |= isinstance(part, int) and isinstance(body, list) and part < len(body)
        if known:
            body = body[part]
        elif not (part is loc[-1] and isinstance(body, dict) and _FIELD.fullmatch(str(part))):
            continue
        names.append(str(part))
    return ".".join(names) or None


def _wrong(text: str, param: str | None) -> ErrorAnswer:
    return ErrorAnswer(400, text, "invalid_request_error", param, None)


def _methods(request: Request, routes: list[BaseRoute]) -> list[str]:
    """Every method of a path; the router itself names those of one route."""
    matching = [
        route
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for route in matching for method in route.methods or ()})


def _document(app: FastAPI, service: Service) -> None:
    """FastAPI documents 422 for every body; a body that is not valid is OpenAI's 400 here. The
    document names the models of this server."""
    describe = app.openapi
    names = [service.config.name, *service.config.model.aliases]

    def openapi() -> dict[str, Any]:
        document = describe()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name in (ChatBody.__name__, CompletionBody.__name__):
            schemas[name]["properties"]["model"] = {"type": "string", "enum": names}
            for example in schemas[name]["examples"]:
                example["model"] = names[0]
        return document

    app.openapi = openapi
