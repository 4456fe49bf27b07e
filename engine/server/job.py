"""Job: what the engine is asked for one request; made of a body by pure functions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.chat.base import Tokenizer, ToolDeclaration
from engine.runtime.types import Constraint, ContextPolicy, Sampling
from engine.server.config import AnswerSection, LimitsSection, UserSection
from engine.server.errors import BadRequest
from engine.server.format import ChatFormat, num_calls
from engine.server.wire import (
    ChatBody,
    CompletionBody,
    Generation,
    JsonObject,
    JsonSchema,
    NamedTool,
    StructuredOutputs,
    Tool,
)

BAN = -1e4
"""Added to the logit of a token that must not be sampled."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of every choice: a thought first, then what a constraint holds to."""

    sampling: Sampling
    stop_ids: tuple[int, ...]
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """``phases``: the first ends at ``think_end`` where there are two. ``choices``: how many
    answers to the one prompt."""

    prompt_ids: tuple[int, ...]
    choices: int
    max_tokens: int
    phases: tuple[Phase, ...]
    policy: ContextPolicy
    stop_texts: tuple[str, ...] = ()
    include_stop: bool = False
    num_logprobs: int = 0
    deadline_s: float | None = None
    think_end: int | None = None
    debug: bool = False

    def sampling_of(self, phase: Phase, choice: int) -> Sampling:
        """Each answer draws for itself."""
        seed = phase.sampling.seed
        assert seed is not None, "every job has a seed"
        return replace(phase.sampling, seed=(seed + choice * _GOLDEN) & _MASK)


@dataclass(frozen=True, slots=True)
class Server:
    """What jobs are made with."""

    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    chat: ChatFormat | None
    limits: LimitsSection
    answer: AnswerSection


@dataclass(frozen=True, slots=True)
class ChatJob:
    """``calls``: whether calls may be in the answer."""

    job: Job
    calls: bool
    thinking: bool


def chat_job(server: Server, body: ChatBody, user: UserSection, default_thinking: bool) -> ChatJob:
    """BadRequest names the parameter."""
    chat = server.chat
    if chat is None:
        raise BadRequest(
            "this model has no chat format; POST /v1/completions takes plain text", "messages"
        )
    limits = server.limits
    _at_most("messages", len(body.messages), limits.max_messages)
    tools = body.tools or []
    _at_most("tools", len(tools), limits.max_tools)
    thinking = _thinks(body, default_thinking) and chat.thinking is not None
    declared = _declared(tools)
    prompt = tuple(body.prompt_token_ids or chat.prompt(body.messages, declared, thinking))
    choice = _choice(body, tools)
    constraint = _constraint(body, tools, choice, chat, server.answer)
    stop_ids = [] if body.ignore_eos else [*chat.renderer(thinking).stop_ids]
    calls = bool(tools) and choice != "none"
    bias: dict[int, float] = {}
    if not calls:
        bias = dict.fromkeys(chat.call_start_ids, BAN)
    elif body.parallel_tool_calls is False and constraint is None:
        if not chat.call_end_ids:
            raise BadRequest(
                "parallel_tool_calls=false needs answer.enforce_tools where a vocabulary has no "
                "marker that ends a call; leave it out",
                "parallel_tool_calls",
            )
        stop_ids += chat.call_end_ids
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    job = _job(server, body, user, prompt, stop_ids, bias)
    given = body.max_completion_tokens or body.max_tokens
    param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    job = replace(
        job,
        max_tokens=_max_tokens(server, given, param, len(prompt)),
        stop_texts=_stops(body),
        num_logprobs=body.top_logprobs or 0,
    )
    return ChatJob(_phased(job, constraint, chat, thinking), calls, thinking)


def completion_jobs(server: Server, body: CompletionBody, user: UserSection) -> list[Job]:
    """One job a prompt."""
    if body.best_of not in (None, body.n or 1):
        raise BadRequest("best_of is not offered; ask for n answers and choose", "best_of")
    if body.suffix:
        raise BadRequest("suffix is not offered: models here write from left to right", "suffix")
    if body.echo and body.logprobs is not None:
        raise BadRequest("echo with logprobs is not offered: prompts have none", "echo")
    prompts = _prompts(server, body)
    _at_most("n", (body.n or 1) * len(prompts), server.limits.max_choices)
    constraint = _structured(body.structured_outputs)
    jobs: list[Job] = []
    for prompt in prompts:
        stop_ids = [] if body.ignore_eos else end_ids(server)
        job = _job(server, body, user, prompt, stop_ids, {})
        phases = tuple(replace(phase, constraint=constraint) for phase in job.phases)
        jobs.append(
            replace(
                job,
                phases=phases,
                max_tokens=_max_tokens(server, body.max_tokens, "max_tokens", len(prompt)),
                stop_texts=_stops(body),
                num_logprobs=body.logprobs or 0,
            )
        )
    return jobs


def _prompts(server: Server, body: CompletionBody) -> list[tuple[int, ...]]:
    if body.prompt_token_ids is not None:
        return [tuple(body.prompt_token_ids)]
    prompt = body.prompt
    if prompt is None:
        raise BadRequest("expected prompt or prompt_token_ids", "prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    several: list[Any] = [prompt] if one else list(prompt)
    encode = server.tokenizer.encode
    return [tuple(encode(text) if isinstance(text, str) else text) for text in several]


def end_ids(server: Server) -> list[int]:
    """What a text ends with, where a request does not say."""
    if server.chat is not None:
        return list(server.chat.instant.stop_ids)
    from engine.chat.vocabulary import Vocabulary

    return list(Vocabulary.of(server.tokenizer).eos_ids)


def _job(
    server: Server,
    body: Generation,
    user: UserSection,
    prompt: tuple[int, ...],
    stop_ids: Sequence[int],
    bias: dict[int, float],
) -> Job:
    """Everything that chat and completions have in common."""
    param = "prompt_token_ids" if body.prompt_token_ids is not None else "messages"
    if isinstance(body, CompletionBody) and body.prompt_token_ids is None:
        param = "prompt"
    _check_prompt(server, prompt, param)
    _at_most("n", body.n or 1, server.limits.max_choices)
    _check_ids("stop_token_ids", body.stop_token_ids or (), server.vocab_size)
    ids = [int(key) for key in body.logit_bias or {}]
    _check_ids("logit_bias", ids, server.vocab_size)
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()} | bias
    answer = server.answer
    sampling = Sampling(
        temperature=answer.temperature if body.temperature is None else body.temperature,
        top_p=answer.top_p if body.top_p is None else body.top_p,
        # vLLM's -1 is our 0
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _MASK,
        logit_bias=tuple(sorted(bias.items())),
    )
    stops = tuple(dict.fromkeys([*stop_ids, *(body.stop_token_ids or ())]))
    return Job(
        prompt_ids=prompt,
        choices=body.n or 1,
        max_tokens=1,
        phases=(Phase(sampling, stops),),
        policy=ContextPolicy(
            kv=user.kv,
            summaries=user.summaries,
            priority=user.priority,
            rate_class=user.rate_class,
        ),
        include_stop=body.include_stop_str_in_output,
        deadline_s=server.limits.request_timeout_s,
        debug=body.attention_debug,
    )


def _phased(job: Job, constraint: Constraint | None, chat: ChatFormat, thinking: bool) -> Job:
    """With a constraint and an open block of reasoning: first the thought, to its end, in which the
    turn must not end; then what the constraint holds to."""
    (phase,) = job.phases
    held = replace(phase, constraint=constraint)
    if constraint is None or not chat.opens_thought(thinking):
        return replace(job, phases=(held,))
    think_end = chat.tokenizer.special_id("</think>")
    banned = (*chat.renderer(thinking).stop_ids, *chat.call_start_ids)
    bias = dict(phase.sampling.logit_bias) | dict.fromkeys(banned, BAN)
    thought = replace(phase.sampling, logit_bias=tuple(sorted(bias.items())))
    return replace(job, phases=(Phase(thought, (think_end,)), held), think_end=think_end)


def _thinks(body: ChatBody, default: bool) -> bool:
    given = body.chat_template_kwargs
    if given is not None:
        for value in (given.thinking, given.enable_thinking):
            if value is not None:
                return value
    if body.reasoning_effort is not None:
        return body.reasoning_effort not in ("none", "minimal")
    return default


def _declared(tools: Sequence[Tool]) -> list[ToolDeclaration]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise BadRequest(
                f"tool {tool.function.name!r} is declared twice; names must differ",
                f"tools.{index}.function.name",
            )
        names.add(tool.function.name)
    nothing = {"type": "object", "properties": {}}
    return [
        ToolDeclaration(
            tool.function.name, tool.function.description or "", tool.function.parameters or nothing
        )
        for tool in tools
    ]


def _choice(body: ChatBody, tools: Sequence[Tool]) -> Any:
    """As Constraint's tool_calls takes it, or "none"."""
    given = body.tool_choice
    if given is None:
        return "auto" if tools else "none"
    if isinstance(given, NamedTool):
        name = given.function.name
        if name not in {tool.function.name for tool in tools}:
            raise BadRequest(f"tool_choice names {name!r}, which is none of tools", "tool_choice")
        return {"name": name}
    if given == "required" and not tools:
        raise BadRequest('tool_choice="required" needs tools', "tool_choice")
    return given if tools else "none"


def _constraint(
    body: ChatBody, tools: Sequence[Tool], choice: Any, chat: ChatFormat, answer: AnswerSection
) -> Constraint | None:
    held = _structured(body.structured_outputs)
    form = body.response_format
    if isinstance(form, JsonObject | JsonSchema):
        if held is not None:
            raise BadRequest(
                "response_format and structured_outputs exclude each other", "response_format"
            )
        schema = form.json_schema.schema_ if isinstance(form, JsonSchema) else {"type": "object"}
        held = Constraint("json_schema", json.dumps(schema))
    if choice == "none":
        return held
    if held is not None:
        raise BadRequest(
            "a format of the answer and tools exclude each other; leave one out, or say "
            'tool_choice="none"',
            "response_format",
        )
    if choice == "auto" and not answer.enforce_tools:
        return None
    spec = {
        "tools": [tool.model_dump(exclude_none=True) for tool in tools],
        "choice": choice,
        "style": chat.call_style,
        "parallel": body.parallel_tool_calls is not False,
        "first_index": num_calls(body.messages),
    }
    return Constraint("tool_calls", json.dumps(spec))


def _structured(given: StructuredOutputs | None) -> Constraint | None:
    if given is None:
        return None
    asked = [v for v in (given.json_, given.regex, given.grammar, given.choice) if v is not None]
    if len(asked) != 1:
        raise BadRequest(
            f"structured_outputs holds {len(asked)} of json, regex, grammar, choice; expected one",
            "structured_outputs",
        )
    if given.json_ is not None:
        return Constraint("json_schema", json.dumps(given.json_))
    if given.regex is not None:
        return Constraint("regex", given.regex)
    if given.grammar is not None:
        return Constraint("grammar", given.grammar)
    options = " | ".join(json.dumps(one) for one in given.choice or ())
    return Constraint("grammar", f"start: {options}")


def _stops(body: Generation) -> tuple[str, ...]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(dict.fromkeys(given))


def _max_tokens(server: Server, given: int | None, param: str, length: int) -> int:
    """What was asked, or the server's own; a context that fills up ends an answer too."""
    limits = server.limits
    if given is not None:
        _at_most(param, given, limits.max_tokens)
    asked = min(limits.default_max_tokens, limits.max_tokens) if given is None else given
    return min(asked, server.max_context - length)


def _check_prompt(server: Server, prompt: Sequence[int], param: str) -> None:
    if not prompt:
        raise BadRequest("the prompt has no tokens; expected at least one", param)
    _check_ids(param, prompt, server.vocab_size)
    if len(prompt) >= server.max_context:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; this model's context holds "
            f"{server.max_context}, answer included: shorten it",
            param,
            "context_length_exceeded",
        )


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise BadRequest(
            f"token id {bad} is outside the vocabulary; expected 0 to {vocab_size - 1}", param
        )


def _at_most(param: str, given: int, limit: int) -> None:
    if given > limit:
        raise BadRequest(f"{param}: {given} is more than this server's limit of {limit}", param)
