"""A conversation with a server of OpenAI's interface, for ``parl chat --url``."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from infra.errors import ConfigError, ParlError

if TYPE_CHECKING:
    import httpx2

KEY_VARIABLES = ("PARL_API_KEY", "OPENAI_API_KEY")


class ServerAnswer(ParlError, RuntimeError):
    """The server refused, or could not be reached."""


class RemoteConversation:
    """One dialogue; the server keeps nothing of it between the turns."""

    def __init__(self, url: str, model: str, system: str | None, options: dict[str, Any]) -> None:
        """``url``: with or without /v1. ``model`` "" = the first that the server names."""
        import httpx2

        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: expected http://HOST:PORT or https://HOST")
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # a long answer may be silent while its prompt is read
        self._client = httpx2.AsyncClient(base_url=base, headers=headers, timeout=600)
        self._model = model
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self._options = options
        self._messages: list[dict[str, str]] = list(self._first)

    async def say(self, user: str) -> AsyncIterator[str]:
        """The answer in pieces; a turn that fails is no part of the dialogue."""
        import httpx2

        messages = [*self._messages, {"role": "user", "content": user}]
        said = ""
        try:
            body = {"model": await self._name(), "messages": messages, "stream": True}
            path = "/v1/chat/completions"
            async with self._client.stream("POST", path, json=body | self._options) as answer:
                await _check(answer)
                async for line in answer.aiter_lines():
                    piece = _piece(line)
                    said += piece
                    if piece:
                        yield piece
        except httpx2.HTTPError as error:
            raise ServerAnswer(
                f"{self._client.base_url}: {type(error).__name__} {error}; does `parl serve` run "
                "there?"
            ) from error
        self._messages = [*messages, {"role": "assistant", "content": said}]

    async def close(self) -> None:
        """The next ``say`` begins a new dialogue."""
        self._messages = list(self._first)

    async def _name(self) -> str:
        if not self._model:
            answer = await self._client.get("/v1/models")
            await _check(answer)
            self._model = answer.json()["data"][0]["id"]
        return self._model


async def _check(answer: httpx2.Response) -> None:
    if answer.status_code == 200:
        return
    text = (await answer.aread()).decode("utf-8", "replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:200]
    key = f" (set {KEY_VARIABLES[0]})" if answer.status_code == 401 else ""
    raise ServerAnswer(f"the server answered {answer.status_code}: {text}{key}")


def _piece(line: str) -> str:
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return ""
    chunk = json.loads(data)
    if "error" in chunk:
        raise ServerAnswer(f"the answer broke off: {chunk['error']['message']}")
    return "".join(c["delta"].get("content") or "" for c in chunk["choices"])
