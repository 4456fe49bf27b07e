"""The lines of a Dockerfile, and what of them a box without Docker can do."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandbox.errors import TaskError

_INSTALLERS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|pip3?|uv|npm|pnpm|yarn|conda|cargo|gem|curl|wget|git\s+clone)\b"
)

_HEREDOC = re.compile(r"(?<!<)<<-?(?!<)([\"']?)([A-Za-z_]\w*)\1")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What an image starts from when it sets none."""


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction; ``number`` is the line it starts at, ``end`` the one it ends with. ``body``:
    the lines of its here-document, with the closing one."""

    number: int
    word: str
    rest: str
    end: int = 0
    body: tuple[str, ...] = ()


@dataclass(slots=True)
class Recipe:
    """``copies``: (source below the build context, absolute target); ``notes``: what is lost."""

    workdir: str = "/app"
    copies: list[tuple[str, str]] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse_dockerfile(text: str) -> list[Line]:
    """Instructions with continued lines joined; comments are gone."""
    lines: list[Line] = []
    start, held = 0, ""
    numbered = iter(enumerate(text.splitlines(), start=1))
    for number, raw in numbered:
        if raw.lstrip().startswith("#") or (not raw.strip() and not held):
            continue
        start = start or number
        if raw.rstrip().endswith("\\"):
            held += raw.rstrip()[:-1] + " "
            continue
        word, _, rest = (held + raw).strip().partition(" ")
        found = _HEREDOC.search(rest) if word.upper() in ("RUN", "COPY", "ADD") else None
        body: list[str] = []
        while found is not None and (not body or body[-1].strip() != found[2]):
            following = next(numbered, None)
            if following is None:
                break
            number = following[0]
            body.append(following[1])
        if word:
            lines.append(Line(start, word.upper(), rest.strip(), number, tuple(body)))
        start, held = 0, ""
    return lines


def read_recipe(path: Path) -> Recipe:
    """What the Dockerfile does to the files; installing needs a network and is noted instead."""
    recipe = Recipe()
    args: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    for line in parse_dockerfile(text):
        match line.word:
            case "FROM":
                image = expand(line.rest.split()[0], args) if line.rest else "?"
                recipe.notes.append(
                    f"image {image} is not used: the box has this machine's /usr (bash, coreutils, "
                    "Python)"
                )
            case "WORKDIR":
                recipe.workdir = str(PurePosixPath(recipe.workdir) / line.rest.strip("\"'"))
            case "COPY" | "ADD":
                _copy(recipe, line, path)
            case "ENV":
                known = {"PATH": PATH, **args, **recipe.env}
                for name, value in _env(line, path).items():
                    recipe.env[name] = expand(value, known)
            case "ARG":
                name, _, value = line.rest.partition("=")
                args[name.strip()] = expand(value.strip().strip("\"'"), args)
            case "RUN":
                _run(recipe, line)
            case "LABEL" | "EXPOSE" | "CMD" | "ENTRYPOINT" | "USER" | "SHELL":
                pass  # a box runs no server of the image, as nobody but its own user
            case _:
                recipe.notes.append(f"{path.name}:{line.number}: {line.word} is ignored")
    return recipe


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")


def expand(text: str, known: dict[str, str]) -> str:
    """``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME:+other}`` as a build expands them."""

    def value(found: re.Match[str]) -> str:
        held = known.get(found[1] or found[2], "")
        if found[3] == "+":
            return found[4] if held else ""
        return held or (found[4] or "")

    return _VARIABLE.sub(value, text)


def copy_words(line: Line, path: Path) -> list[str]:
    """Sources and target of a COPY or ADD, options left out."""
    try:
        words = json.loads(line.rest) if line.rest.startswith("[") else shlex.split(line.rest)
    except ValueError as error:
        raise TaskError(f"{path}:{line.number}: {line.word} {line.rest}: {error}") from error
    words = [word for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise TaskError(
            f"{path}:{line.number}: {line.word} {line.rest}: expected source and target"
        )
    return words


def _copy(recipe: Recipe, line: Line, path: Path) -> None:
    if "--from=" in line.rest or line.body:
        recipe.notes.append(f"{path.name}:{line.number}: {line.word} {line.rest} is ignored")
        return
    *sources, target = copy_words(line, path)
    absolute = str(PurePosixPath(recipe.workdir) / target)
    if target.endswith("/") or target == "." or len(sources) > 1:
        absolute += "/"
    recipe.copies += [(source, absolute) for source in sources]


def _env(line: Line, path: Path) -> dict[str, str]:
    try:
        words = shlex.split(line.rest)
    except ValueError as error:
        raise TaskError(f"{path}:{line.number}: ENV {line.rest}: {error}") from error
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def shell_command(line: Line) -> str:
    """The text of a RUN with its here-document: as a script of its own, or read by the command."""
    if not line.body:
        return line.rest
    if _HEREDOC.fullmatch(line.rest):
        return "\n".join(line.body[:-1])
    return "\n".join([line.rest, *line.body])


def _run(recipe: Recipe, line: Line) -> None:
    command = shell_command(line)
    if command.startswith("["):
        command = shlex.join(json.loads(command))
    if _INSTALLERS.search(command):
        recipe.notes.append(f"RUN {command[:100]} is skipped: a box has no network to install from")
    else:
        recipe.run.append(f"cd {shlex.quote(recipe.workdir)} && {command}")
