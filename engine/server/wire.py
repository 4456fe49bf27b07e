"""Bodies of requests, as OpenAI's clients send them; fields beyond OpenAI's are vLLM's.

Unknown fields are refused by name: a parameter that is silently ignored changes what is measured.
Fields that change nothing here (``user``, ``metadata``, ``store`` ...) are taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
_ID = r"^[A-Za-z0-9_.:@/-]+$"


class Body(BaseModel):
    """A request body: unknown keys and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _whole(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Opt: TypeAlias = None
"""Clients send null for what they do not set."""
TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Ignored: TypeAlias = Any
"""Taken, whatever it is, and without effect."""


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = (
    Annotated[str, Field(max_length=2**24)] | Annotated[list[TextPart], Field(max_length=1024)]
)


class CalledFunction(Body):
    name: Name
    arguments: str


class ToolCall(Body):
    """A call of an earlier answer; ``index`` is what streaming clients keep."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Whole | Opt = None


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: Ignored = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: Annotated[str, Field(pattern=r"^[^\s<|>]{1,64}$")] | Opt = None


class AssistantMessage(Body):
    """An earlier answer, with all that this server's answers hold."""

    role: Literal["assistant"]
    content: Content | Opt = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | Opt = None
    reasoning_content: str | Opt = None
    name: Ignored = None
    refusal: Ignored = None
    audio: Ignored = None
    annotations: Ignored = None
    function_call: None = None
    tool_call_error: Ignored = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Name | Opt = None


_ROLES = ("system", "user", "assistant", "tool")


def _role(value: Any) -> str:
    """Which message a value means to be, so that its errors are about that one."""
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "system" if role == "developer" else role if role in _ROLES else "user"


ChatMessage = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_role),
]


class FunctionTool(Body):
    name: Name
    description: str | Opt = None
    parameters: dict[str, Any] | Opt = None
    strict: bool | Opt = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | Opt = None
    strict: bool | Opt = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | JsonObject | JsonSchema, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's: exactly one of them."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    json_: dict[str, Any] | Opt = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | Opt = None
    grammar: Annotated[str, Field(min_length=1)] | Opt = None
    choice: Annotated[list[str], Field(min_length=1, max_length=256)] | Opt = None


class StreamOptions(Body):
    include_usage: bool | Opt = None
    include_obfuscation: Ignored = None


class ChatTemplateArguments(Body):
    thinking: bool | Opt = None
    enable_thinking: bool | Opt = None


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Generation(Body):
    """What both kinds of completion take."""

    model: Annotated[str, Field(pattern=_ID, max_length=200)]
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | Opt = None
    temperature: Annotated[float, Field(ge=0, le=2)] | Opt = None
    top_p: Annotated[float, Field(gt=0, le=1)] | Opt = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31 - 1)] | Opt = None
    min_p: Annotated[float, Field(ge=0, le=1)] | Opt = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | Opt = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | Opt = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | Opt = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | Opt = None
    n: Annotated[Whole, Field(ge=1, le=128)] | Opt = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | Opt = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | Opt = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: (
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ]
        | Opt
    ) = None
    stream: bool | Opt = None
    stream_options: StreamOptions | Opt = None
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)] | Opt = None
    """Instead of the rendered messages or the prompt."""
    return_token_ids: bool | Opt = None
    return_tokens_as_token_ids: bool | Opt = None
    structured_outputs: StructuredOutputs | Opt = None
    attention_debug: bool = False
    """Tell where the engine's time went, with each choice."""
    user: Ignored = None
    metadata: Ignored = None


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}]
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | Opt = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | Opt = None
    parallel_tool_calls: bool | Opt = None
    response_format: ResponseFormat | Opt = None
    logprobs: bool | Opt = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | Opt = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | Opt = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | Opt = None
    chat_template_kwargs: ChatTemplateArguments | Opt = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | Opt = None
    store: Ignored = None
    service_tier: Ignored = None
    verbosity: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


_Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Field(min_length=1)]
    | _Ids
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    | Annotated[list[_Ids], Field(min_length=1)],
    Field(union_mode="left_to_right"),
]


class CompletionBody(Generation):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "MODEL", "prompt": "Once", "max_tokens": 4}]}
    )

    prompt: Prompt | Opt = None
    echo: bool | Opt = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | Opt = None
    best_of: Whole | Opt = None
    suffix: str | Opt = None
    skip_special_tokens: bool = True
