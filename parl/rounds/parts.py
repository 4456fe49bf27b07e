"""What every process of a run builds from the config alone: chat, family, tasks, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.chat.renderer import KimiRenderer
from engine.chat.tokenizers import ByteTokenizer
from engine.errors import ChatError
from infra.errors import ConfigError
from parl.config import RunConfig
from parl.learner.advantages import check_estimator
from parl.rollout.kimi_chat import KimiChat
from parl.rollout.settings import RolloutSettings
from parl.rounds.jobs import JobMaker
from parl.rounds.tasks import TaskSource
from parl.sft.warm_start import WarmStart
from reward_models.units import units_of
from sandbox.catalog.base import Family
from sandbox.catalog.registry import get_family
from sandbox.check.folder_family import PREFIX, FolderFamily
from sandbox.config import SandboxConfig
from sandbox.pool import config_for
from sandbox.proxied import check_proxy
from sandbox.task import TaskSpec


@dataclass(frozen=True, slots=True)
class RunParts:
    """Equal configs give equal parts, so driver and workers need not send them around."""

    config: RunConfig
    renderer: KimiRenderer
    chat: KimiChat
    family: Family
    tasks: TaskSource

    @staticmethod
    def of(config: RunConfig) -> RunParts:
        """ConfigError when vocabulary and model differ or a name is unknown, TaskError for an
        unknown family."""
        check_estimator(config.rounds.advantage)
        tokenizer = _tokenizer(config.chat.words)
        if tokenizer.vocab_size != config.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size}, but bytes, markers and "
                f"{len(config.chat.words)} chat.words make {tokenizer.vocab_size}; set it to that"
            )
        renderer = KimiRenderer(tokenizer, config.chat.declare_tools)
        family = find_family(config)
        strange = sorted(set(config.tasks.min_tokens) - set(family.task_types))
        if strange:
            raise ConfigError(
                f"tasks.min_tokens.{strange[0]}: family {config.tasks.family!r} has no such task "
                f"type; it has {', '.join(family.task_types)}"
            )
        tasks = TaskSource(
            family,
            config.tasks.mix or dict.fromkeys(family.task_types, 1.0),
            config.run.seed,
            config.rollout.num_prompts,
            config.tasks.min_tokens,
            counted_units(family),
        )
        return RunParts(config, renderer, KimiChat(renderer, config.chat.system), family, tasks)

    def jobs(self, run_id: str) -> JobMaker:
        return JobMaker(self.config, run_id)

    def warm_start(self) -> WarmStart:
        return WarmStart(
            self.config.warm_start,
            family=self.family,
            tasks=self.tasks.demonstrations,
            chat=self.chat,
            renderer=self.renderer,
            seed=self.config.run.seed,
        )


def _tokenizer(words: tuple[str, ...]) -> ByteTokenizer:
    try:
        return ByteTokenizer(words)
    except ChatError as error:
        raise ConfigError(f"chat.words: {error}") from error


def rollout_settings(config: RunConfig) -> RolloutSettings:
    return RolloutSettings(
        max_attempts=config.rollout.max_attempts,
        max_concurrent=config.sandbox.pool_size,
        deterministic=config.engine.deterministic,
        call_timeout_s=config.sandbox.call_timeout_s + 5.0,
    )


def sandbox_config(config: RunConfig, run_id: str = "") -> SandboxConfig:
    """Boxes of the run, as large as the largest of its tasks asks. ``run_id`` goes into
    containers' labels."""
    section = config.sandbox
    if section.proxy_socket and section.proxy_file:
        raise ConfigError(
            "sandbox.proxy_socket and sandbox.proxy_file are both set; the proxy at the socket has "
            "a configuration of its own, drop proxy_file"
        )
    boxes = SandboxConfig(
        level=section.level,
        docker=section.docker,
        unsafe_local=section.unsafe_local,
        run=run_id,
        allow_live=section.allow_live,
        proxy_socket=Path(section.proxy_socket) if section.proxy_socket else None,
        proxy_file=Path(section.proxy_file) if section.proxy_file else None,
        # the audit log outlives the run
        proxy_dir=Path(config.run.dir) / run_id / "proxy" if run_id else None,
    )
    family = find_family(config)
    specs = [family.instance(0, 0, "train", kind) for kind in family.task_types]
    for spec in specs:
        check_proxy(spec, boxes)
    asked = [config_for(spec, boxes) for spec in specs]
    return boxes.model_copy(
        update={
            name: max(getattr(size, name) for size in asked)
            for name in ("memory_mib", "disk_mib", "cpus")
        }
    )


def counted_units(family: Family) -> Callable[[TaskSpec], dict[str, float]] | None:
    """Units of a task folder's own files, counted once a folder; shipped families say theirs."""
    if not isinstance(family, FolderFamily):
        return None

    @cache
    def count(folder: Path) -> dict[str, float]:
        environment = folder / "environment"
        return units_of(environment) if environment.is_dir() else {}

    return lambda task: dict(count(family.folder(task)))


def find_family(config: RunConfig) -> Family:
    """A shipped family by name, or the tasks of "folder:PATH" for the run's boxes; TaskError for
    neither."""
    name = config.tasks.family
    if name.startswith(PREFIX):
        # unsafe_local does not choose an image; level C without it is refused where boxes open
        boxes = SandboxConfig(level=config.sandbox.level, docker=config.sandbox.docker)
        return FolderFamily(Path(name.removeprefix(PREFIX)), boxes)
    return get_family(name)
