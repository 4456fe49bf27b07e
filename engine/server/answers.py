"""Bodies of answers, OpenAI's; fields beyond OpenAI's are vLLM's names for the same."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """``param``: dotted name of the parameter that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of every sampled token, those of markers and of the stop included."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionText(BaseModel):
    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionText


class AnswerMessage(BaseModel):
    """``tool_call_error``: what is wrong with the turn that the model wrote (a call that breaks
    off, a marker in the wrong place), in one line."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None
    tool_call_error: str | None = None


FinishReasonText = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """``stop_reason``: the stop text or token id that ended it; "deadline" or "cancelled"."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText
    stop_reason: str | int | None = None
    weight_version: int | None = None
    attention_debug: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    weight_version: int | None = None
    attention_debug: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    weight_version: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "loading", "draining"]


def without_none(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """``values`` without those of ``names`` that are None: fields that only some ask for."""
    return {key: value for key, value in values.items() if value is not None or key not in names}
