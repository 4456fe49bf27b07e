"""Static rules over a task folder: what can be seen without running anything."""

from __future__ import annotations

from pathlib import Path

from sandbox.check.findings import Step
from sandbox.check.lint_agent_code import lint_agent_code
from sandbox.check.lint_clock import lint_clock
from sandbox.check.lint_code import lint_shell, lint_tools, lint_verifier
from sandbox.check.lint_image import lint_context, lint_image
from sandbox.check.lint_luck import lint_luck
from sandbox.check.lint_manifest import lint_manifest
from sandbox.check.lint_secrets import lint_secrets
from sandbox.check.stated import lint_links
from sandbox.check.subject import content_files

KNOWN_ENTRIES = frozenset(
    {"task.toml", "instruction.md", "environment", "tools", "tests", "solution", "attacks"}
    | {"cassettes", "README.md", "LICENSE", "trajectory.json", "steps", ".gitignore"}
)


def lint_folder(folder: Path) -> Step:
    """Every rule on every file; a folder that cannot be loaded is linted as far as it goes."""
    step = Step("lint")
    files = content_files(folder)
    _layout(folder, files, step)
    lint_secrets(folder, files, step)
    lint_manifest(folder, step)
    lint_image(folder, step)
    lint_context(folder, step)
    lint_tools(folder, step)
    lint_verifier(folder, step)
    lint_shell(folder, step)
    lint_agent_code(folder, step)
    lint_luck(folder, step)
    lint_clock(folder, step)
    lint_links(folder, step)
    step.note = f"{len(files)} files"
    return step


def _layout(folder: Path, files: list[Path], step: Step) -> None:
    for path in files:
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            step.add(
                "linked-file",
                name,
                f"is a link to {path.readlink()}; a task must hold its files itself, because a "
                "link shows a box what it points to on each machine",
            )
        elif path.is_file() and path.stat().st_mode & 0o002:
            part = name.split("/")[0]
            rule = "mutable-tests" if part in ("tests", "solution") else "world-writable"
            step.add(
                rule,
                name,
                "is writable by every user; chmod o-w it",
                "error" if rule == "mutable-tests" else "warning",
            )
    for entry in sorted(folder.iterdir()):
        if entry.name not in KNOWN_ENTRIES and not entry.name.startswith("."):
            step.add(
                "unknown-entry",
                entry.name,
                f"is no part of a task; known: {', '.join(sorted(KNOWN_ENTRIES))}",
                "warning",
            )
    instruction = folder / "instruction.md"
    if instruction.is_file() and not instruction.read_text("utf-8", "replace").strip():
        step.add("empty-instruction", "instruction.md", "says nothing; state the task")
    if not any((folder / "attacks").glob("*")):
        step.add(
            "no-attacks",
            "attacks/",
            "no attack of the author's own; add the shortest way to cheat that you can think of",
            "warning",
        )
