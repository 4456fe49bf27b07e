"""LookupCalc: "lookup a" and "add a b" over a store of six random values.

The smallest world that needs tools: the values are drawn per instance, so the answer cannot be
known without calling them. Training and held-out instances never share (type, asked keys, their
values): that triple is hashed into one of five buckets, and bucket 0 is held out.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sandbox.catalog.base import Oracle, Split
from sandbox.catalog.draws import Draws, is_heldout_text
from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest, Metadata
from sandbox.manifest.reading import load_manifest
from sandbox.manifest.rendering import render_manifest
from sandbox.session import RawCall
from sandbox.task import TaskSpec, ToolBundle, spec_from_manifest

HERE = Path(__file__).parent
TASK_TYPES = ("lookup", "add")
KEYS = string.ascii_lowercase[:8]
LETTERS = string.ascii_lowercase
NUM_KEYS = 6
NUM_ASKED = {"lookup": 1, "add": 2}
DEFAULT_MIN_TOKENS = {"lookup": 30, "add": 90}
"""Author's estimate with the byte tokenizer of the demo; a run passes its own."""


class LookupCalc:
    """The family; implements ``sandbox.catalog.base.Family``."""

    name = "lookup_calc"
    task_types = TASK_TYPES

    def __init__(self, min_tokens: Mapping[str, int] | None = None, keys: str = KEYS) -> None:
        """``min_tokens``: fewest sampled tokens of a correct solution, by task type. ``keys``: the
        characters keys are drawn from, at least six different lower-case letters."""
        if len(set(keys)) != len(keys) or len(keys) < NUM_KEYS or set(keys) - set(LETTERS):
            raise TaskError(
                f"lookup_calc keys {keys!r}: expected {NUM_KEYS} or more different letters a-z"
            )
        self._keys = keys
        self._min_tokens = {**DEFAULT_MIN_TOKENS, **(min_tokens or {})}
        for task_type in self._min_tokens:
            _expect_type(task_type)
        self.bundle = ToolBundle(
            name=self.name,
            tools_source=(HERE / "tools" / "tools.py").read_text(encoding="utf-8"),
            verify_source=(HERE / "tests" / "verify.py").read_text(encoding="utf-8"),
            trusted=True,
        )
        self._manifests: dict[str, Manifest] = {}
        self._templates: dict[str, TaskSpec] = {}
        for task_type in TASK_TYPES:
            folder = HERE / task_type
            manifest = load_manifest(folder / "task.toml")
            instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
            self._manifests[task_type] = manifest
            self._templates[task_type] = spec_from_manifest(
                manifest, self.bundle, instruction=instruction, file=f"{folder}/task.toml"
            )

    def instance(self, seed: int, index: int, split: Split, task_type: str) -> TaskSpec:
        """Instance ``index`` of ``split``, drawn from (seed, index, split, task_type) alone."""
        _expect_type(task_type)
        if split not in get_args(Split):
            raise TaskError(f"unknown split {split!r}; expected 'train' or 'heldout'")
        draws = Draws(f"lookup_calc|{seed}|{index}|{split}|{task_type}")
        while True:
            keys = draws.sample(self._keys, NUM_KEYS)
            store = {key: 1 + draws.below(9) for key in keys}
            asked = keys[: NUM_ASKED[task_type]]
            if (split == "heldout") == is_heldout(task_type, asked, [store[key] for key in asked]):
                break
        template = self._templates[task_type]
        return replace(
            template,
            name=f"parl/{task_type}-{split}-{seed}-{index}",
            instruction=template.instruction.replace("$keys", " ".join(asked)),
            environment=replace(template.environment, data={"store": store}),
            verifier=replace(
                template.verifier,
                data={"answer": sum(store[key] for key in asked), "store": store},
            ),
            min_tokens=self._min_tokens[task_type],
            seed=seed,
        )

    def oracle(self, spec: TaskSpec) -> Oracle:
        """One call a round: the lookups, for ``add`` then the calculator, then the number."""
        _expect_type(spec.task_type)
        asked = asked_keys(spec)
        store = spec.environment.data["store"]
        calls = [("lookup", {"key": key}) for key in asked]
        if spec.task_type == "add":
            calls.append(("calc", {"expression": "+".join(str(store[key]) for key in asked)}))
        rounds = tuple(
            (RawCall(f"functions.{tool}:{index}", json.dumps(arguments, separators=(",", ":"))),)
            for index, (tool, arguments) in enumerate(calls)
        )
        return Oracle(rounds=rounds, final_text=str(sum(store[key] for key in asked)))

    def export(self, spec: TaskSpec, folder: Path) -> None:
        """Write an instance as a self-contained Harbor folder that ``load_task`` reads back."""
        folder.mkdir(parents=True, exist_ok=False)
        for part in ("tools", "tests", "environment", "solution"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / part, folder / part, ignore=ignore)
        manifest = self._manifests[spec.task_type]
        parl = manifest.metadata.parl
        assert parl is not None, f"{spec.task_type}: task.toml lost its [metadata.parl]"
        manifest = manifest.model_copy(
            update={
                "task": manifest.task.model_copy(update={"name": spec.name}),
                "metadata": Metadata(
                    parl=parl.model_copy(update={"min_tokens": spec.min_tokens, "seed": spec.seed})
                ),
            }
        )
        (folder / "task.toml").write_text(render_manifest(manifest), encoding="utf-8")
        (folder / "instruction.md").write_text(spec.instruction + "\n", encoding="utf-8")
        for part, data in (("environment", spec.environment.data), ("tests", spec.verifier.data)):
            (folder / part / "data.json").write_text(json.dumps(data, sort_keys=True))
        lines = [
            json.dumps(
                {
                    "name": call.name_text.split(".")[1].split(":")[0],
                    "arguments": call.arguments_text,
                }
            )
            for calls in self.oracle(spec).rounds
            for call in calls
        ]
        lines.append(json.dumps({"final_text": self.oracle(spec).final_text}))
        (folder / "solution" / "calls.jsonl").write_text("\n".join(lines) + "\n")


def asked_keys(spec: TaskSpec) -> list[str]:
    """Keys the instruction names, in order."""
    return spec.instruction.split()[1:]


def is_heldout(task_type: str, asked: list[str], values: list[int]) -> bool:
    """Whether what the model reads and must write is reserved for evaluation."""
    text = f"{task_type}|{' '.join(asked)}|{' '.join(map(str, values))}"
    return is_heldout_text(text)


def _expect_type(task_type: str) -> None:
    if task_type not in TASK_TYPES:
        raise TaskError(
            f"lookup_calc has no task type {task_type!r}; known: {', '.join(TASK_TYPES)}"
        )
