"""POST /v1/completions: plain text or ids, for tools that bring their own format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine.server.answers import CompletionAnswer, without_none
from engine.server.documented import errors, streamed
from engine.server.gate import record_of
from engine.server.generate import Event, Piece
from engine.server.job import Job, completion_jobs, end_ids
from engine.server.responding import respond
from engine.server.service import Service
from engine.server.streams import Chunk
from engine.server.tokens import (
    Sampled,
    TokenText,
    alternatives,
    finish_reason,
    number,
    stop_reason,
)
from engine.server.turns.base import Characters
from engine.server.wire import CompletionBody


def completion_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.post(
        "/completions",
        response_model=CompletionAnswer,
        responses={**streamed(CompletionAnswer), **errors(400, 401, 404, 408, 413, 429, 500, 503)},
        summary="What follows a text.",
    )
    async def complete(request: Request, body: Annotated[CompletionBody, Body()]) -> Response:
        service.check_model(body.model)
        record = record_of(request.scope)
        jobs = completion_jobs(service.server, body, service.config.policy_of(record.user))
        record.values["stream"] = bool(body.stream)
        options = body.stream_options
        return await respond(
            service,
            request,
            CompletionAnswering(service, body, jobs, record.id),
            jobs,
            stream=bool(body.stream),
            with_usage=bool(options and options.include_usage),
        )

    return router


class _Choice:
    def __init__(self, job: Job, sampled: Sampled, characters: Characters) -> None:
        self.job = job
        self.sampled = sampled
        self.characters = characters
        self.text = ""
        self.length = 0
        """Characters of all tokens whose logprobs were told."""
        self.logprobs: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        self.ending: dict[str, Any] = {}


class CompletionAnswering:
    """Answering of completion jobs; choices count over all of them."""

    def __init__(
        self, service: Service, body: CompletionBody, jobs: Sequence[Job], request_id: str
    ) -> None:
        loaded = service.loaded
        self.fingerprint = ""
        self._body = body
        self._jobs = jobs
        self._id = f"cmpl-{request_id.removeprefix('req_')}"
        self._created = int(time.time())
        self._tokenizer = loaded.tokenizer
        self._ends = end_ids(service.server)
        self._names = TokenText(loaded.vocabulary, bool(body.return_tokens_as_token_ids))
        hidden = frozenset(body.stop_token_ids or ())
        if body.skip_special_tokens:
            hidden |= loaded.vocabulary.special_ids
        self._choices = [
            _Choice(
                job,
                Sampled(loaded.tokenizer, loaded.vocabulary, job, hidden),
                Characters(loaded.tokenizer),
            )
            for job in jobs
            for _ in range(job.choices)
        ]

    def first(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for index, choice in enumerate(self._choices):
            if self._body.echo:
                chunks.append(self._chunk(index, self._prompt_text(choice)))
            if self._body.return_token_ids:
                ids = list(choice.job.prompt_ids)
                chunks.append(self._chunk(index, "", {"prompt_token_ids": ids}))
        return chunks

    def _prompt_text(self, choice: _Choice) -> str:
        text = self._tokenizer.decode(choice.job.prompt_ids)
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def take(self, event: Event) -> list[Chunk]:
        index = event.choice
        choice = self._choices[index]
        if isinstance(event, Piece):
            text = choice.characters.push(choice.sampled.push(event))
            choice.text += text
            told = self._told(choice, event)
            return [self._chunk(index, text, told)] if text or told else []
        text = choice.characters.push(choice.sampled.end(event)) + choice.characters.flush()
        choice.text += text
        choice.ending = {
            "finish_reason": finish_reason(event),
            "stop_reason": stop_reason(event, self._ends),
            "weight_version": event.weight_version,
        }
        if event.debug is not None:
            choice.ending["attention_debug"] = event.debug
        return [self._chunk(index, text, choice.ending)]

    def _told(self, choice: _Choice, piece: Piece) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.logprobs is not None:
            told["logprobs"] = new = self._logprobs(choice, piece, self._body.logprobs)
            for key, values in new.items():
                choice.logprobs[key] += values
        if self._body.return_token_ids:
            told["token_ids"] = piece.token_ids
        return told

    def _logprobs(self, choice: _Choice, piece: Piece, num_top: int) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {key: [] for key in choice.logprobs}
        for row, (token_id, logprob) in enumerate(
            zip(piece.token_ids, piece.logprobs.tolist(), strict=True)
        ):
            name = self._names.name(token_id)
            found["tokens"].append(name)
            found["token_logprobs"].append(number(logprob))
            found["text_offset"].append(choice.length)
            top = {self._names.name(i): number(v) for i, v in alternatives(piece, row, num_top)}
            # OpenAI tells the sampled token too, be it likely or not
            found["top_logprobs"].append({**top, name: number(logprob)})
            choice.length += len(name)
        return found

    def _chunk(self, index: int, text: str, more: dict[str, Any] | None = None) -> Chunk:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            **(more or {}),
        }
        return self._frame([choice])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **usage,
        }

    def usage(self) -> dict[str, int]:
        prompt = sum(len(job.prompt_ids) for job in self._jobs)
        sampled = sum(len(choice.sampled.token_ids) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def usage_chunk(self) -> Chunk:
        return {**self._frame([]), "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        frame = self._frame([self._whole(i, choice) for i, choice in enumerate(self._choices)])
        return {**frame, "usage": self.usage()}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        ids = self._body.return_token_ids
        whole = {
            "index": index,
            "text": (self._prompt_text(choice) if self._body.echo else "") + choice.text,
            "logprobs": choice.logprobs if self._body.logprobs is not None else None,
            **choice.ending,
            "prompt_token_ids": list(choice.job.prompt_ids) if ids else None,
            "token_ids": choice.sampled.token_ids if ids else None,
        }
        return without_none(whole, "prompt_token_ids", "token_ids")
