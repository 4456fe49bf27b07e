"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine.server.answers import ChatAnswer, without_none
from engine.server.documented import errors, streamed
from engine.server.gate import record_of
from engine.server.generate import Event, Piece
from engine.server.job import ChatJob, chat_job
from engine.server.responding import respond
from engine.server.service import Service
from engine.server.streams import Chunk
from engine.server.tokens import Sampled, TokenText, finish_reason, stop_reason
from engine.server.turns import Delta, Turn, TurnDeltas
from engine.server.wire import ChatBody


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post(
        "/chat/completions",
        response_model=ChatAnswer,
        responses={**streamed(ChatAnswer), **errors(400, 401, 404, 408, 413, 429, 500, 503)},
        summary="The next turn of a dialogue.",
    )
    async def chat(request: Request, body: Annotated[ChatBody, Body()]) -> Response:
        service.check_model(body.model)
        record = record_of(request.scope)
        config = service.config
        job = chat_job(service.server, body, config.policy_of(record.user), config.model.thinking)
        record.values["stream"] = bool(body.stream)
        options = body.stream_options
        return await respond(
            service,
            request,
            ChatAnswering(service, body, job, record.id),
            [job.job],
            stream=bool(body.stream),
            with_usage=bool(options and options.include_usage),
        )

    return router


class _Choice:
    """One answer as it grows."""

    def __init__(self, sampled: Sampled, reader: TurnDeltas) -> None:
        self.sampled = sampled
        self.reader = reader
        self.turn = Turn()
        self.logprobs: list[dict[str, Any]] = []
        self.ending: dict[str, Any] = {}

    def add(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            self.turn.add(delta)
        return deltas


class ChatAnswering:
    """Answering of a ChatJob."""

    def __init__(self, service: Service, body: ChatBody, job: ChatJob, request_id: str) -> None:
        loaded = service.loaded
        chat = service.server.chat
        assert chat is not None, "chat_job refuses a model without a chat format"
        self.fingerprint = ""
        self._body = body
        self._job = job.job
        self._id = f"chatcmpl-{request_id.removeprefix('req_')}"
        self._created = int(time.time())
        self._model = body.model
        self._ends = chat.renderer(job.thinking).stop_ids
        self._names = TokenText(loaded.vocabulary, bool(body.return_tokens_as_token_ids))
        markers = loaded.vocabulary.special_ids
        hidden = frozenset(body.stop_token_ids or ()) - markers
        self._choices = [
            _Choice(
                Sampled(loaded.tokenizer, loaded.vocabulary, self._job, hidden),
                chat.turn(
                    calls=job.calls,
                    thinking=job.thinking,
                    call_prefix=f"call_{self._id[-12:]}_{index}_",
                ),
            )
            for index in range(self._job.choices)
        ]

    def first(self) -> list[Chunk]:
        chunks: list[Chunk] = [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(len(self._choices))
        ]
        if self._body.return_token_ids:
            chunks[0] = {**chunks[0], "prompt_token_ids": list(self._job.prompt_ids)}
        return chunks

    def take(self, event: Event) -> list[Chunk]:
        choice = self._choices[event.choice]
        if isinstance(event, Piece):
            deltas = choice.reader.push(choice.sampled.push(event))
            return [*self._said(event.choice, choice.add(deltas), event)]
        deltas = choice.reader.push(choice.sampled.end(event))
        choice.add(deltas)
        last = choice.add(choice.reader.finish())
        chunks: list[Chunk] = [*self._said(event.choice, [*deltas, *last], None)]
        choice.ending = {
            "finish_reason": finish_reason(event, len(choice.turn.calls)),
            "stop_reason": stop_reason(event, self._ends),
            "weight_version": event.weight_version,
        }
        if event.debug is not None:
            choice.ending["attention_debug"] = event.debug
        error = choice.reader.error
        chunks.append(
            self._chunk(
                event.choice, {} if error is None else {"tool_call_error": error}, choice.ending
            )
        )
        return chunks

    def _said(self, index: int, deltas: list[Delta], piece: Piece | None) -> list[dict[str, Any]]:
        """A chunk a delta; the first one brings what is told of the piece's tokens."""
        told: dict[str, Any] = {}
        if piece is not None and self._body.logprobs:
            entries = self._names.entries(piece, self._job.num_logprobs)
            self._choices[index].logprobs += entries
            told["logprobs"] = {"content": entries, "refusal": None}
        if piece is not None and self._body.return_token_ids:
            told["token_ids"] = piece.token_ids
        spoken = [_delta(delta) for delta in deltas] or ([{}] if told else [])
        return [
            self._chunk(index, delta, told if number == 0 else {})
            for number, delta in enumerate(spoken)
        ]

    def _chunk(
        self, index: int, delta: dict[str, Any], more: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **(more or {}),
        }
        return self._frame([choice])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._wants_usage else {}
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **usage,
        }

    @property
    def _wants_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def usage(self) -> dict[str, int]:
        sampled = sum(len(choice.sampled.token_ids) for choice in self._choices)
        prompt = len(self._job.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def usage_chunk(self) -> Chunk:
        return {**self._frame([]), "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        ids = list(self._job.prompt_ids) if self._body.return_token_ids else None
        answer = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.fingerprint,
            "choices": [self._whole(i, choice) for i, choice in enumerate(self._choices)],
            "usage": self.usage(),
            "prompt_token_ids": ids,
        }
        return without_none(answer, "prompt_token_ids")

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        turn = choice.turn
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
        message = {
            "role": "assistant",
            "content": turn.content or (None if calls else ""),
            "refusal": None,
            "reasoning_content": turn.reasoning or None,
            "tool_calls": calls or None,
            "tool_call_error": choice.reader.error,
        }
        logprobs = {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None
        whole = {
            "index": index,
            "message": without_none(message, "reasoning_content", "tool_calls", "tool_call_error"),
            "logprobs": logprobs,
            **choice.ending,
            "token_ids": choice.sampled.token_ids if self._body.return_token_ids else None,
        }
        return without_none(whole, "token_ids")


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.content:
        return {"content": delta.content}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    call = delta.call
    assert call is not None, "a delta says something"
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"tool_calls": [{"index": call.index, "function": function}]}
    head = {"index": call.index, "id": call.id, "type": "function"}
    return {"tool_calls": [{**head, "function": {"name": call.name, **function}}]}
