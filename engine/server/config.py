"""Settings of the OpenAI-compatible server: what `parl serve --config FILE` reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.config import EngineConfig
from engine.light.alarms import AlarmConfig
from engine.light.waiting_room import RouterConfig
from engine.model.config import AttentionConfig
from infra.config import ConfigModel

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ModelSection(ConfigModel):
    """Which weights are served, and how text becomes ids."""

    path: str = ""
    """Folder of safetensors or a .gguf file; empty = ``preset``."""
    preset: str = ""
    """A shape of `parl model info` with random weights, to try a server without a download."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of a preset's random weights."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9._:@-]{0,100}$")
    """What clients call the model; empty = the folder's or preset's name."""
    aliases: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@/-]{1,100}$")], ...] = ()
    """More names that mean it, such as the one that an application has built in."""
    tokenizer: str = ""
    """Folder or file; empty = the model's own. ``bytes`` = bytes and Kimi's markers."""
    words: tuple[str, ...] = ()
    """With ``bytes``: whole strings that get a token of their own (a run's chat.words)."""
    chat: Literal["auto", "kimi-k2", "kimi-k2.5", "chatml", "none"] = "auto"
    """Format of dialogues; auto = what the model was trained on; none = completions only."""
    attention: AttentionConfig | None = None
    """Replaces what the checkpoint says of mode, hybrid, hot and profile."""
    thinking: bool = False
    """Kimi K2.5 thinks before it answers, unless a request says otherwise."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if bool(self.path) == bool(self.preset):
            raise ValueError(
                "expected either model.path (a folder or .gguf file) or model.preset (such as "
                "demo), not both"
            )
        if self.preset and not self.tokenizer:
            raise ValueError(
                "a preset has no tokenizer of its own; set model.tokenizer to bytes or to a folder"
            )
        return self


class ListenSection(ConfigModel):
    host: str = "127.0.0.1"
    """Beyond loopback API keys are required."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 = any free one."""
    keys_file: str = ""
    """Mode 600; a key a line, `NAME KEY`. Names may have a [users.NAME]. Empty = the environment
    variable PARL_SERVE_KEYS (`NAME=KEY`, commas between), or no keys."""

    @property
    def is_loopback(self) -> bool:
        return self.host in _LOOPBACK


class LimitsSection(ConfigModel):
    """What one request, and all of them, may take."""

    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    max_messages: int = Field(default=1024, ge=1)
    max_tools: int = Field(default=128, ge=1)
    max_choices: int = Field(default=16, ge=1)
    """``n``, times the prompts of a completion."""
    max_tokens: int = Field(default=4096, ge=1)
    """Of one answer."""
    default_max_tokens: int = Field(default=1024, ge=1)
    """Of an answer whose request names no limit; OpenAI's /v1/completions would take 16."""
    max_concurrent: int = Field(default=256, ge=1)
    """Requests that run; one more is refused with 429."""
    retry_after_s: float = Field(default=1.0, gt=0)
    """What a refused client is told."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Then an answer ends with what it has, finish_reason "length", stop_reason "deadline"."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """How long running requests may go on after SIGTERM."""
    max_drafts: int = Field(default=64, ge=1)
    """Pieces of an answer that wait for a slow reader, before its generation waits too."""


class UserSection(ConfigModel):
    """How requests with one API key are served."""

    kv: Literal["auto", "full", "tiered"] = "auto"
    """``full`` keeps every key and value in full precision."""
    summaries: bool = False
    priority: int = Field(default=0, ge=-100, le=100)
    rate_class: str = "default"


class AnswerSection(ConfigModel):
    """Sampling where a request says nothing, and what tools must look like."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    enforce_tools: bool = True
    """Calls of ``tool_choice: auto`` hold to their schemas too; required and named ones always
    do."""


class MriSection(ConfigModel):
    """The engine's own interface over HTTP (/mri), behind the same API keys: contexts, steps on
    token ids, eviction. For rollouts on other machines; people need none of it."""

    enabled: bool = False
    weights: bool = False
    """Weights may be replaced over it: every key can then change what everybody is answered."""
    weights_root: str = ""
    """Folder below which version folders are read by path; empty = uploads only."""


class ServingEngineConfig(EngineConfig):
    """The engine's keys with a server's defaults: a class, so that naming one key leaves the others
    as they are here."""

    max_context: int = Field(default=4096, ge=1)
    num_blocks: int = Field(default=2048, ge=1)
    max_contexts: int = Field(default=256, ge=1)
    deterministic: bool = False


class ServeConfig(ConfigModel):
    """One server."""

    model: ModelSection
    listen: ListenSection = ListenSection()
    limits: LimitsSection = LimitsSection()
    answer: AnswerSection = AnswerSection()
    user: UserSection = UserSection()
    """Of requests without a key of their own name."""
    users: dict[str, UserSection] = Field(default_factory=dict[str, UserSection])
    """By the name of their API key."""
    mri: MriSection = MriSection()
    engine: ServingEngineConfig = ServingEngineConfig()
    router: RouterConfig = RouterConfig()
    """How many answers are sampled at once, how many may wait, and what each rate class may use."""
    alarms: AlarmConfig = AlarmConfig()
    """When the KV cache is too full, and what happens then."""
    alarm_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at it."""
    warm_up_rounds: int = Field(default=3, ge=0)
    """Times that the whole KV cache is taken, written and given back before the server says that it
    is ready, so that no request waits for its memory. 0 = memory comes as contexts grow."""
    warm_up_tokens: int = Field(default=8, ge=1, le=64)
    """Sampled before the server says that it is ready."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        from pathlib import Path

        given = self.model.name or self.model.preset
        return given or Path(self.model.path).stem or "model"

    def policy_of(self, user: str) -> UserSection:
        return self.users.get(user, self.user)
