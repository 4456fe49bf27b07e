"""What the verifier wants and nobody is told: words, files, keys and forms that no text names."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sandbox.check.answers import same_score
from sandbox.check.arguments import argument_places
from sandbox.check.episodes import Stage
from sandbox.check.findings import Severity, Step
from sandbox.check.reads import decoded_calls
from sandbox.check.scripts import Script, has_shell
from sandbox.check.subject import Case
from sandbox.check.values import leaves
from sandbox.check.written import Written, overwriting
from sandbox.session import RawCall
from sandbox.task import TaskSpec

_FREE_TEXT = re.compile(r"[\w\s,.;:!?'\"-]{2,120}")
_WORDS = re.compile(r"[^\W\d_]{3,}")
_COMPACT = re.compile(
    r"(?i)\b(compact|minified|one line|single line|sorted|same order|in (this|the) order|exactly)\b"
)
_WITHOUT = "without the key"
_ANY_ORDER = re.compile(r"(?i)\bin any order\b|\border does not matter\b|顺序不限|任意顺序")


def known_text(spec: TaskSpec, texts: tuple[str, ...]) -> str:
    """All that an agent is told or can read, folded: instruction, tools, world, answers."""
    parts = [spec.instruction, *texts]
    for tool in spec.tools:
        parts += [tool.name, tool.description, json.dumps(tool.schema, ensure_ascii=False)]
    parts += list(_strings(spec.environment.data))
    return "\n".join(parts).casefold()


def _strings(value: Any) -> Iterator[str]:
    """Strings and keys of nested data; packed files as their text."""
    if isinstance(value, dict):
        if isinstance(value.get("base64"), str):
            try:
                yield base64.b64decode(value["base64"]).decode("utf-8", "replace")
            except binascii.Error:  # not a packed file after all: its strings count
                yield value["base64"]
            return
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif value is not None:
        yield str(value)


async def try_hidden(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Episodes played; ``spec`` and ``stage`` are those of the probe bundle."""
    known = known_text(spec, written.texts)
    if has_shell(spec):
        return await _files(stage, spec, oracle, written, known, step)
    return await _texts(stage, spec, oracle, written, known, step)


async def _texts(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, known: str, step: Step
) -> int:
    """Free texts of the solution whose words no text has: without these words it must still pass,
    or the verifier asks for what nobody is told."""
    count = 0
    required = {tool.name: tool.schema.get("required", ()) for tool in spec.tools}
    for place in argument_places(spec, oracle):
        value = place.arguments[place.key]
        if not isinstance(value, str) or not _FREE_TEXT.fullmatch(value):
            continue
        unseen = [word for word in _WORDS.findall(value) if word.casefold() not in known]
        if not unseen:
            continue
        text = value
        for word in unseen:
            text = text.replace(word, "").strip(" ,.;:")
        # the same in every call of the tool: each may need it
        script = _everywhere(oracle, spec, place.tool, place.key, value, text or "parl-other")
        played = await stage.play(spec, script)
        count += 1
        failed = any(seen.error is not None for seen in played.observations)
        if failed or same_score(played, written):
            continue
        optional = place.key not in required.get(place.tool, ())
        severity: Severity = "error" if optional else "warning"
        step.add(
            "hidden-requirement",
            f"tool {place.tool}: {place.key}",
            f"the verifier wants {', '.join(map(repr, unseen))[:80]} in it, which neither the "
            "instruction nor anything that can be read says; state it in instruction.md",
            severity,
        )
    return count


def _everywhere(
    oracle: Script, spec: TaskSpec, tool: str, key: str, value: str, text: str
) -> Script:
    rounds = []
    for calls in oracle.rounds:
        changed = []
        for call in calls:
            decoded = decoded_calls(Case(spec, Script("one", ((call,),))))
            if decoded and decoded[0][0] == tool and decoded[0][1].get(key) == value:
                arguments = {**decoded[0][1], key: text}
                call = RawCall(call.name_text, json.dumps(arguments, ensure_ascii=False))
            changed.append(call)
        rounds.append(tuple(changed))
    return replace(oracle, name="oracle-known-words", rounds=tuple(rounds))


async def _files(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, known: str, step: Step
) -> int:
    """Files that must be written: their names, their keys, and the form of their text."""
    count = 0
    _named_paths(spec, written, step)
    paths = [path for path in written.created if not path.startswith((".", "solution/", "tests/"))]
    for path in sorted(paths):
        content = written.artifacts.get(path, b"").decode("utf-8", "replace")
        forms = dict(list(_forms(path, content, spec.instruction, known).items())[:3])
        if count >= 6:
            break
        name = path.rsplit("/", 1)[-1]
        if name.casefold() not in known:
            played = await stage.play(spec, overwriting("oracle-no-file", oracle, [], "", [path]))
            count += 1
            if not same_score(played, written):
                step.add("hidden-requirement", f"file {name}", "must be written, but no text "
                         "names it; name every file in instruction.md")  # fmt: skip
        for what, text in forms.items():
            played = await stage.play(spec, overwriting("oracle-reformed", oracle, [path], text))
            count += 1
            if same_score(played, written):
                continue
            if what.startswith(_WITHOUT):
                step.add(
                    "hidden-requirement",
                    f"file {name}",
                    f"{what} it does not pass, and neither the instruction nor a file names that "
                    "key; state it in instruction.md",
                )
            else:
                step.add(
                    "format-sensitive",
                    f"file {name}",
                    f"the same content {what} does not pass; parse the file and compare values, or "
                    "let the instruction say so",
                )
    return count


def _named_paths(spec: TaskSpec, written: Written, step: Step) -> None:
    """Files that the instruction names are there before the solution or after it."""
    cwd = str(spec.environment.data.get("cwd", "/app"))
    roots = "|".join(re.escape(root) for root in spec.environment.data.get("roots", ()))
    known = {*written.artifacts, *written.inputs, *written.removed}
    known = {f"/{path}" for path in known} | {f"{cwd.rstrip('/')}/{path}" for path in known}
    for path in dict.fromkeys(
        re.findall(rf"(?<![\w./])/(?:{roots})/[\w./-]*\w\.[a-z0-9]{{1,6}}\b", spec.instruction)
    ):
        if path not in known:
            step.add(
                "instruction-contradicts",
                "instruction.md",
                f"names {path}, which is neither in the world nor made by the solution; does the "
                "verifier look elsewhere?",
                "error" if re.search(r"(?i)\b(write|save|store|put|create)\w*\b[^.]{0,80}"
                                     + re.escape(path), spec.instruction) else "warning",
            )  # fmt: skip


def _forms(path: str, content: str, instruction: str, known: str) -> dict[str, str]:
    """The same content in other forms; and JSON without one of its keys."""
    found: dict[str, str] = {}
    try:
        value = json.loads(content)
    except ValueError:  # a table or a text
        value = None
    if isinstance(value, dict | list):
        if not _COMPACT.search(instruction):
            turned = dict(reversed(value.items())) if isinstance(value, dict) else value
            found["with other spaces and order of keys"] = json.dumps(turned, indent=3)
        if isinstance(value, dict):
            for key in value:
                if any(word.casefold() not in known for word in _WORDS.findall(str(key))):
                    less = {name: inner for name, inner in value.items() if name != key}
                    found[f"{_WITHOUT} {key}"] = json.dumps(less)
        return found
    lines = content.splitlines()
    if (
        len(lines) > 3
        and path.endswith((".csv", ".tsv", ".jsonl", ".txt"))
        and _ANY_ORDER.search(instruction)
    ):
        head = lines[:1] if path.endswith((".csv", ".tsv")) else []
        found["in another order of lines"] = (
            "\n".join([*head, *reversed(lines[len(head) :])]) + "\n"
        )
    return found


def solution_without_reading(case: Case, texts: tuple[str, ...], step: Step) -> None:
    """A solution that calls no tool, or changes things of the world that it never read of."""
    if not case.oracle.num_calls and case.spec.tools:
        step.add(
            "solution-without-tools",
            "solution/",
            "the solution calls no tool: where its answer comes from is not shown, and that the "
            "tools can find it is not tried; let it read what it answers from",
        )
        return
    if has_shell(case.spec):
        return
    effects = {tool.name: tool.effect for tool in case.spec.tools}
    world = {leaf.value for leaf in leaves(case.spec.environment.data)
             if isinstance(leaf.value, str) and len(leaf.value) > 2}  # fmt: skip
    schemas = [json.dumps(tool.schema, ensure_ascii=False) + tool.description
               for tool in case.spec.tools]  # fmt: skip
    for number, (tool, arguments) in enumerate(decoded_calls(case)):
        seen = "\n".join([case.spec.instruction, *schemas, *texts[:number]])
        for key, value in arguments.items():
            if effects[tool] != "read" and isinstance(value, str) and value in world and (
                value not in seen
            ):  # fmt: skip
                step.add(
                    "solution-without-reading",
                    f"solution/: call {number + 1} ({tool})",
                    f"passes {value!r} as {key}, which neither the instruction nor an answer "
                    "before it holds; a policy cannot know it, so let the solution read it first",
                    "error" if re.search(r"[\W\d_]", value) else "warning",
                )
                return
