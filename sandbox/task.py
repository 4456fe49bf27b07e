"""TaskSpec: one task instance, ready to run; and the loader of a Harbor 1.4 task folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sandbox.box_image import BoxImage
from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest
from sandbox.manifest.native import is_native, load_native
from sandbox.manifest.parl_section import LoopSection, ParlSection, ToolSection
from sandbox.manifest.reading import load_manifest
from sandbox.proxy.declare import ProxySpec
from sandbox.proxy.errors import ProxyError
from sandbox.shell.world import BUNDLE_NAME, MakeWorld, shell_sources, shell_world
from sandbox.tool_schema import tools_from_source
from sandbox.tool_spec import STRICT, Effect, KeyRepair, LoopSpec, PollSpec, ToolSpec

if TYPE_CHECKING:
    from sandbox.proxy.config import ProxyConfig

__all__ = [
    "Effect",
    "EnvironmentSpec",
    "Limits",
    "LoopSpec",
    "PollSpec",
    "TaskSpec",
    "ToolBundle",
    "ToolSpec",
    "VerifierSpec",
    "load_task",
    "spec_from_manifest",
]


@dataclass(frozen=True, config=STRICT)
class Limits:
    """What one episode may use; ``timeout_s`` is the whole episode, the others one turn or call."""

    max_turns: int = 32
    max_tokens_per_turn: int | None = None
    timeout_s: float = 600.0
    call_timeout_s: float = 10.0
    max_output_bytes: int = 65536
    setup_timeout_s: float = 30.0


@dataclass(frozen=True, config=STRICT)
class EnvironmentSpec:
    """The box of the agent. ``data`` is given to ``setup`` of tools.py: the agent may see it."""

    data: dict[str, Any] = Field(default_factory=dict)
    memory_mib: int | None = None
    disk_mib: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, config=STRICT)
class VerifierSpec:
    """``data`` (the answer) never enters the agent's box."""

    data: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(frozen=True, config=STRICT)
class TaskSpec:
    """One task instance. Equal content, equal ``content_hash``; the code it needs is a ToolBundle.

    ``budget_units``: e.g. {"calls": 3}; ``min_tokens``: fewest sampled tokens of a correct
    solution; ``bundle``: hash of the ToolBundle this instance belongs to; ``key_repair``: how far
    argument keys may be matched at most; ``state_digest``: function of tools.py whose value changes
    with the world, which tells progress from a loop; ``proxy``: those of ``tools`` that the tool
    proxy serves.
    """

    name: str
    task_type: str
    instruction: str
    tools: tuple[ToolSpec, ...]
    bundle: str
    family: str | None = None
    environment: EnvironmentSpec = EnvironmentSpec()
    verifier: VerifierSpec = VerifierSpec()
    budget_units: dict[str, float] = Field(default_factory=dict)
    min_tokens: int | None = None
    seed: int = 0
    limits: Limits = Limits()
    pass_threshold: float = 1.0
    reward_range: tuple[float, float] = (0.0, 1.0)
    forbidden_tools: tuple[str, ...] = ()
    key_repair: KeyRepair = "fuzzy"
    state_digest: str | None = None
    proxy: ProxySpec | None = None

    @cached_property
    def content_hash(self) -> str:
        """sha256 (64 hex digits) of every field but the folder; the ledger's task id."""
        plain = self._plain()
        if "proxy" in plain:
            del plain["proxy"]["folder"]
        return hashlib.sha256(_canonical(plain).encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return _canonical(self._plain())

    def _plain(self) -> dict[str, Any]:
        plain = asdict(self)
        if plain["proxy"] is None:  # ids of tasks without a proxy are older than this field
            del plain["proxy"]
        return plain

    @staticmethod
    def from_json(text: str) -> TaskSpec:
        """Inverse of ``to_json``; TaskError if the text is not a TaskSpec."""
        try:
            return TypeAdapter(TaskSpec).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise TaskError(f"task JSON: key {key!r}: {first['msg']}") from error


def _canonical(plain: dict[str, Any]) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, config=STRICT)
class ToolBundle:
    """The code of a task family: text of tools/tools.py and tests/verify.py.

    ``trusted`` is set only for code shipped with PARL; anything else needs an isolating backend.
    ``packages``: pure-Python distributions that tools.py may import (``sandbox.packages``).
    ``image``, ``verifier_image``: what the agent's and the verifier's containers are made of, where
    the task brings images (``sandbox.imaged``).
    """

    name: str
    tools_source: str
    verify_source: str
    trusted: bool = False
    packages: tuple[str, ...] = ()
    image: BoxImage | None = None
    verifier_image: BoxImage | None = None

    @cached_property
    def hash(self) -> str:
        """sha256 over name, sources, packages and images."""
        parts: list[Any] = [self.name, self.tools_source, self.verify_source]
        if self.packages:
            parts.append(list(self.packages))
        if self.image is not None and self.verifier_image is not None:
            parts += [asdict(self.image), asdict(self.verifier_image)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, config=STRICT)
class LoadedTask:
    """A task folder in memory. ``notes``: what a box does not give a plain Harbor task, a line
    each."""

    spec: TaskSpec
    bundle: ToolBundle
    manifest: Manifest
    notes: tuple[str, ...] = ()


def load_task(
    folder: Path, *, record: ProxyConfig | None = None, make_world: MakeWorld = shell_world
) -> LoadedTask:
    """Load a Harbor task folder: with ``tools/tools.py`` and ``tests/verify.py``, or a plain one.

    ``environment/data.json`` becomes the box's data, ``tests/data.json`` the verifier's; text files
    below ``environment/files/`` reach ``setup`` as ``data["files"]``. A folder without
    ``tools/tools.py`` is a shell world (sandbox.shell), judged by ``tests/test.sh``.
    ``record``: for a session that records the cassettes of proxied tools (sandbox.recording); the
    MCP servers it names are started, with the secrets, network and boxes of this node.
    ``make_world``: another world for a plain folder (sandbox.imaged).
    TaskError names the file, the key and the nearest known key.
    """
    file = folder / "task.toml"
    if not (folder / "tools" / "tools.py").exists() and (folder / "tests" / "test.sh").exists():
        return _load_shell_task(folder, record, make_world)
    manifest = load_manifest(file)
    bundle = ToolBundle(
        name=manifest.task.name,
        tools_source=_read(folder, "tools/tools.py"),
        verify_source=_read(folder, "tests/verify.py"),
        packages=_packages(manifest),
    )
    spec = _spec_of_folder(folder, manifest, bundle, record)
    world = _read_data(folder, "environment/data.json")
    if (folder / "environment" / "files").is_dir():
        world = {**world, "files": _read_files(folder)}
    spec = replace(
        spec,
        environment=replace(spec.environment, data=world),
        verifier=replace(spec.verifier, data=_read_data(folder, "tests/data.json")),
    )
    return LoadedTask(spec=spec, bundle=bundle, manifest=manifest)


def _load_shell_task(folder: Path, record: ProxyConfig | None, make_world: MakeWorld) -> LoadedTask:
    """A Harbor folder that knows nothing of us: a shell, its files and tests/test.sh."""
    file = folder / "task.toml"
    if is_native(file):
        manifest, notes = load_native(file)
    else:
        manifest, notes = load_manifest(file), ()
    tools_source, verify_source = shell_sources()
    bundle = ToolBundle(BUNDLE_NAME, tools_source, verify_source)
    spec = _spec_of_folder(folder, manifest, bundle, record)
    world = make_world(folder, manifest, spec.limits.call_timeout_s)
    bundle = replace(bundle, image=world.image, verifier_image=world.verifier_image)
    spec = replace(
        spec,
        bundle=bundle.hash,
        environment=replace(spec.environment, data=world.environment),
        verifier=replace(spec.verifier, data=world.verifier),
    )
    return LoadedTask(spec=spec, bundle=bundle, manifest=manifest, notes=(*notes, *world.notes))


Proxied = tuple[ProxySpec, tuple[ToolSpec, ...]]


def _spec_of_folder(
    folder: Path, manifest: Manifest, bundle: ToolBundle, record: ProxyConfig | None
) -> TaskSpec:
    parl = manifest.metadata.parl
    proxied: Proxied | None = None
    if parl is not None and parl.proxy:
        from sandbox.proxy.listing import proxied_tools

        try:
            proxied = proxied_tools(parl.proxy, folder, record=record)
        except ProxyError as error:
            place = f"{folder / 'task.toml'}: metadata.parl.proxy"
            raise TaskError(f"{place}: {str(error).removeprefix(f'{place}: ')}") from error
    return spec_from_manifest(
        manifest,
        bundle,
        instruction=_read(folder, "instruction.md").strip(),
        file=str(folder / "task.toml"),
        proxied=proxied,
    )


def spec_from_manifest(
    manifest: Manifest,
    bundle: ToolBundle,
    *,
    instruction: str,
    file: str = "task.toml",
    proxied: Proxied | None = None,
) -> TaskSpec:
    """TaskSpec of a manifest and its code, without instance data. ``proxied``: what its proxy
    section declares (sandbox.proxy.listing)."""
    parl = manifest.metadata.parl
    if parl is None:
        raise TaskError(f"{file}: no [metadata.parl] table; add it with at least task_type")
    low, high = parl.reward_range
    if not low <= parl.pass_threshold <= high:
        raise TaskError(
            f"{file}: metadata.parl.pass_threshold = {parl.pass_threshold} is outside "
            f"reward_range [{low}, {high}]"
        )
    environment = manifest.environment
    if environment.network_mode != "no-network" or environment.allow_internet:
        raise TaskError(
            f"{file}: environment.network_mode = {environment.network_mode!r}: PARL's boxes have "
            "no network; set it to 'no-network'"
        )
    return TaskSpec(
        name=manifest.task.name,
        task_type=parl.task_type,
        instruction=instruction,
        tools=_tools(parl, bundle, file, () if proxied is None else proxied[1]),
        bundle=bundle.hash,
        family=parl.family,
        environment=EnvironmentSpec(
            memory_mib=environment.memory_mb,
            disk_mib=environment.storage_mb,
            cpus=environment.cpus,
        ),
        verifier=VerifierSpec(timeout_s=manifest.verifier.timeout_sec),
        budget_units=dict(parl.budget.units),
        min_tokens=parl.min_tokens,
        seed=parl.seed,
        limits=_limits(parl, manifest.agent.timeout_sec),
        pass_threshold=parl.pass_threshold,
        reward_range=(low, high),
        forbidden_tools=tuple(parl.forbidden_tools),
        key_repair=parl.key_repair,
        state_digest=parl.state_digest,
        proxy=None if proxied is None else proxied[0],
    )


def _limits(parl: ParlSection, timeout_s: float | None) -> Limits:
    return Limits(
        max_turns=parl.budget.max_turns,
        max_tokens_per_turn=parl.budget.max_tokens_per_turn,
        timeout_s=600.0 if timeout_s is None else timeout_s,
        call_timeout_s=parl.budget.call_timeout_s,
        max_output_bytes=parl.budget.max_output_bytes,
        setup_timeout_s=parl.budget.setup_timeout_s,
    )


def _tools(
    parl: ParlSection, bundle: ToolBundle, file: str, proxied: tuple[ToolSpec, ...]
) -> tuple[ToolSpec, ...]:
    own = tools_from_source(bundle.tools_source, allow_none=bool(proxied))
    tools = (*own, *proxied)
    names = [tool.name for tool in tools]
    for tool in proxied:
        if names.count(tool.name) > 1:
            raise TaskError(
                f"{file}: tools.py and metadata.parl.proxy both offer a tool {tool.name!r}; rename "
                f"one (upstreams.NAME.tools.{tool.name}.name)"
            )
        section = parl.tools.get(tool.name)
        if section and (section.effect, section.parameters, section.idempotent) != (None,) * 3:
            raise TaskError(
                f"{file}: metadata.parl.tools.{tool.name}: effect, schema and idempotent of a "
                "proxied tool stand in metadata.parl.proxy.upstreams (the schema in its document)"
            )
    for key, listed in (("tools", parl.tools), ("forbidden_tools", parl.forbidden_tools)):
        for name in listed:
            if name not in names:
                raise TaskError(
                    f"{file}: metadata.parl.{key} names {name!r}, which nothing defines; "
                    f"tools: {', '.join(names)}"
                )
    return tuple(
        _overlay(tool, parl.tools[tool.name]) if tool.name in parl.tools else tool for tool in tools
    )


def _overlay(tool: ToolSpec, section: ToolSection) -> ToolSpec:
    return replace(
        tool,
        description=tool.description if section.description is None else section.description,
        schema=tool.schema if section.parameters is None else section.parameters,
        effect=section.effect or tool.effect,
        idempotent=tool.idempotent if section.idempotent is None else section.idempotent,
        aliases=tuple(section.aliases) or tool.aliases,
        key_aliases=_names(section.key_aliases) or tool.key_aliases,
        result_schema=tool.result_schema if section.result is None else section.result,
        result_aliases=_names(section.result_aliases) or tool.result_aliases,
        loop=tool.loop if section.loop is None else _loop(section.loop),
        cache=section.cache,
        ttl_s=section.ttl_s,
        rate=section.rate,
    )


def _names(aliases: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(names) for key, names in aliases.items()}


def _loop(section: LoopSection) -> LoopSpec:
    return LoopSpec(
        poll=PollSpec(section.poll.min_interval_s, section.poll.max) if section.poll else None,
        cursor_args=tuple(section.cursor_args),
        ignore_args=tuple(section.ignore_args),
        ignore_result=tuple(section.ignore_result),
    )


def _packages(manifest: Manifest) -> tuple[str, ...]:
    parl = manifest.metadata.parl
    return () if parl is None else tuple(parl.packages)


def _inside(folder: Path, name: str) -> Path:
    """``folder/name``; a link that leaves the folder would read the host's files into a box."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"{path}: leads out of the task folder, to {path.resolve()}; copy the file")
    return path


def _read(folder: Path, name: str) -> str:
    path = _inside(folder, name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: a task needs this file as UTF-8 text: {error}") from error


def _read_data(folder: Path, name: str) -> dict[str, Any]:
    path = _inside(folder, name)
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _read_files(folder: Path) -> dict[str, str]:
    """Text of every file below environment/files, by relative path."""
    root = folder / "environment" / "files"
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): _read(folder, str(path.relative_to(folder)))
        for path in paths
        if "__pycache__" not in path.parts
    }
