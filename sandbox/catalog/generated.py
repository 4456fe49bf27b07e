"""GeneratedFamily: what the shipped families share. A family says how to draw one instance.

Its folder holds ``task.toml`` (limits, tools; ``task_type`` is filled in), ``tools/tools.py`` and
``tests/verify.py``. Training and held-out instances never share an identity: each of its texts is
hashed into one of five buckets, and bucket 0 is held out.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from sandbox.catalog.base import Oracle, Split
from sandbox.catalog.draws import Draws, is_heldout_text
from sandbox.catalog.harbor_folder import write_harbor_folder
from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest, Metadata
from sandbox.manifest.reading import load_manifest
from sandbox.session import RawCall
from sandbox.task import TaskSpec, ToolBundle, spec_from_manifest

CATALOG = Path(__file__).parent
LANGUAGES = ("en", "zh")
_MAX_DRAWS = 2000
_BYTES_A_TOKEN = 4
_TOKENS_A_CALL = 6

Call = tuple[str, dict[str, Any]]
"""Tool name and arguments."""
Accepts = Callable[..., bool]
"""Whether texts that identify the content all fall on the instance's side of the split."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One instance before it is a TaskSpec.

    ``world`` goes to ``setup`` in the agent's box, ``judge`` only to the verifier. ``rounds`` and
    ``final_text`` are the oracle.
    """

    instruction: str
    world: dict[str, Any]
    judge: dict[str, Any]
    units: dict[str, float]
    rounds: tuple[tuple[Call, ...], ...]
    final_text: str


def _part(name: str) -> Path:
    return CATALOG / "parts" / f"{name}.py"


def _joined(paths: list[Path]) -> str:
    """One self-contained source: an exported task imports from no other."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


class GeneratedFamily(ABC):
    """Implements ``sandbox.catalog.base.Family``."""

    name: str
    task_types: tuple[str, ...] = LANGUAGES
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions that tools.py imports."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Files of ``catalog/parts`` whose text follows tools.py."""
    verify_parts: ClassVar[tuple[str, ...]] = ()
    """Those whose text follows verify.py."""

    def __init__(self, min_tokens: Mapping[str, int] | None = None) -> None:
        """``min_tokens``: fewest sampled tokens of a correct solution, by task type; default: an
        estimate from the oracle's length."""
        self._min_tokens = dict(min_tokens or {})
        for task_type in self._min_tokens:
            self._expect_type(task_type)
        self.folder = CATALOG / self.name
        tools = [self.folder / "tools" / "tools.py", *map(_part, self.parts)]
        verifier = [self.folder / "tests" / "verify.py", *map(_part, self.verify_parts)]
        self.bundle = ToolBundle(
            name=self.name,
            tools_source=_joined(tools) + self.extra_tools_source(),
            verify_source=_joined(verifier),
            trusted=True,
            packages=self.packages,
        )
        self.manifest = load_manifest(self.folder / "task.toml")
        self._templates = {task_type: self._template(task_type) for task_type in self.task_types}

    @abstractmethod
    def draw(self, draws: Draws, task_type: str, accepts: Accepts) -> Drawn | None:
        """One instance from ``draws`` alone, whose identity ``accepts`` takes; None to draw
        again."""

    def extra_tools_source(self) -> str:
        """Text behind tools.py and its parts."""
        return ""

    def instance(self, seed: int, index: int, split: Split, task_type: str) -> TaskSpec:
        """Instance ``index`` of ``split``, drawn from (seed, index, split, task_type) alone."""
        drawn = self._drawn(seed, index, split, task_type)
        template = self._templates[task_type]
        return replace(
            template,
            name=f"parl/{self.name}.{task_type}-{split}-{seed}-{index}",
            instruction=drawn.instruction,
            environment=replace(template.environment, data=drawn.world),
            verifier=replace(template.verifier, data=drawn.judge),
            budget_units=drawn.units,
            min_tokens=self._min_tokens.get(task_type) or estimate_min_tokens(drawn),
            seed=seed,
        )

    def oracle(self, spec: TaskSpec) -> Oracle:
        """The solution, drawn again from the instance's name; TaskError for a foreign task."""
        pattern = rf"parl/{re.escape(self.name)}\.(\w+)-(train|heldout)-(-?\d+)-(\d+)"
        match = re.fullmatch(pattern, spec.name)
        if match is None:
            raise TaskError(f"{spec.name} is no instance of {self.name}")
        task_type, split, seed, index = match.groups()
        drawn = self._drawn(int(seed), int(index), cast(Split, split), task_type)
        if drawn.judge != spec.verifier.data or drawn.world != spec.environment.data:
            raise TaskError(f"{spec.name} was changed, or drawn by another version of {self.name}")
        calls = iter(range(1_000_000))
        rounds = tuple(
            tuple(
                RawCall(f"functions.{tool}:{next(calls)}", compact(arguments))
                for tool, arguments in turn
            )
            for turn in drawn.rounds
        )
        return Oracle(rounds=rounds, final_text=drawn.final_text)

    def export(self, spec: TaskSpec, folder: Path) -> None:
        """Write an instance as a self-contained Harbor folder that ``load_task`` reads back."""
        write_harbor_folder(folder, spec, self.bundle, self._manifest_of(spec), self.oracle(spec))

    def _drawn(self, seed: int, index: int, split: Split, task_type: str) -> Drawn:
        self._expect_type(task_type)
        if split not in get_args(Split):
            raise TaskError(f"unknown split {split!r}; expected 'train' or 'heldout'")
        draws = Draws(f"{self.name}|{seed}|{index}|{split}|{task_type}")

        def accepts(*identity: str) -> bool:
            return all(is_heldout_text(text) == (split == "heldout") for text in identity)

        for _ in range(_MAX_DRAWS):
            drawn = self.draw(draws, task_type, accepts)
            if drawn is not None:
                return drawn
        raise TaskError(f"{self.name}: no {split} instance in {_MAX_DRAWS} draws")

    def _expect_type(self, task_type: str) -> None:
        if task_type not in self.task_types:
            raise TaskError(
                f"{self.name} has no task type {task_type!r}; known: {', '.join(self.task_types)}"
            )

    def _template(self, task_type: str) -> TaskSpec:
        return spec_from_manifest(
            self._with_parl(task_type=task_type),
            self.bundle,
            instruction="",
            file=f"{self.folder}/task.toml",
        )

    def _with_parl(self, **changes: Any) -> Manifest:
        parl = self.manifest.metadata.parl
        assert parl is not None, f"{self.name}: task.toml has no [metadata.parl]"
        changed = parl.model_copy(update={"packages": list(self.packages), **changes})
        return self.manifest.model_copy(update={"metadata": Metadata(parl=changed)})

    def _manifest_of(self, spec: TaskSpec) -> Manifest:
        parl = self.manifest.metadata.parl
        assert parl is not None, f"{self.name}: task.toml has no [metadata.parl]"
        manifest = self._with_parl(
            task_type=spec.task_type,
            min_tokens=spec.min_tokens,
            seed=spec.seed,
            budget=parl.budget.model_copy(update={"units": dict(spec.budget_units)}),
        )
        task = manifest.task.model_copy(update={"name": spec.name})
        return manifest.model_copy(update={"task": task})


def estimate_min_tokens(drawn: Drawn) -> int:
    """Lower estimate of the tokens of a correct solution: four bytes a token, six tokens a call.

    On the low side on purpose: measured lengths raise the floor (facts/sft-rewards.md 3.4), while
    an estimate above the truth would punish good solutions."""
    size = len(drawn.final_text.encode())
    num_calls = 0
    for turn in drawn.rounds:
        num_calls += len(turn)
        size += sum(len(f"{tool}{compact(arguments)}".encode()) for tool, arguments in turn)
    return max(1, math.ceil(size / _BYTES_A_TOKEN) + _TOKENS_A_CALL * num_calls)


def compact(arguments: dict[str, Any]) -> str:
    """Arguments as a model writes them."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
