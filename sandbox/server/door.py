"""What both doors share: the token comes before the body, and every error has one shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import Header, Request, Response
from fastapi.routing import APIRoute

from sandbox.server.errors import Unauthorized
from sandbox.server.wire import ErrorBody

Authorise = Callable[[Request, str], None]
"""(request, bearer token); Unauthorized when the token does not open this door."""

WORDS = {
    400: "Not HTTP or JSON this server reads.",
    401: "No valid token for this door.",
    404: "No such task or session, or it was closed.",
    408: "The body did not arrive in time.",
    409: "The state of the session, or an Idempotency-Key used before, does not allow it.",
    413: "The body is larger than 1 MiB.",
    422: "The body or a parameter is not valid, or the task is not.",
    429: "Too many calls of this session wait.",
    500: "A bug of the server (infra).",
    502: "The sandbox was lost (infra): nobody's reward.",
    503: "No room now, or the machine cannot (infra); see Retry-After.",
    504: "It takes longer than expected and goes on (infra).",
}

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[A-Za-z0-9._:/-]{1,128}$",
        description="The same key and body again get the same answer; nothing is done twice.",
    ),
]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of the errors an endpoint may answer."""
    return {status: {"model": ErrorBody, "description": WORDS[status]} for status in statuses}


def json_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``errors`` for a route whose own answers are not JSON."""
    reference = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {status: {"content": content, "description": WORDS[status]} for status in statuses}


def bearer(request: Request) -> str:
    """The token of the Authorization header; Unauthorized."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("expected the header `Authorization: Bearer TOKEN`")
    return token.strip()


def guarded(authorise: Authorise) -> type[APIRoute]:
    """A route class that asks for the token before it reads the body: who may not come in learns
    nothing about what a valid body is."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner = super().get_route_handler()

            async def handler(request: Request) -> Response:
                authorise(request, bearer(request))
                return await inner(request)

            return handler

    return GuardedRoute


def one_line(problems: Sequence[Any]) -> str:
    """The first problem of a validation, without the value (it may be a megabyte)."""
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return " ".join(f"{where}: {first['msg']}{more}".split())
