"""Rules over what the agent's image is built from."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from sandbox.check.findings import Step
from sandbox.check.reachable import shared_code, solution_code
from sandbox.errors import TaskError
from sandbox.shell.dockerfile import Line, copy_words, parse_dockerfile

_SECRET_PARTS = ("tests", "solution", "attacks")
_GIVEAWAY = re.compile(
    r"(?i)(^|[/_.-])(solution|solve|oracle|answers?|expected(_\w+)?|ground[_-]?truth|gold(en)?"
    r"|reference[_-]?(solution|answer)|verify|verifier|grader?|checker|reward)s?(?=[_.-]|$|/)"
)
_UNPINNED_PIP = re.compile(r"\bpip3?\s+install\s+(?P<what>[^&|;]+)")
_PIPED = re.compile(r"\b(curl|wget)\b[^|;&]*\|\s*(sudo\s+)?(ba|z|da)?sh\b")
MAX_BYTES = 512 << 10
SIMILAR = 0.8
_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".xml", ".sql")


def lint_image(folder: Path, step: Step) -> None:
    """Dockerfiles and compose files of the agent and of the verifier."""
    for part in ("environment", "tests"):
        for path in sorted((folder / part).glob("**/Dockerfile*")):
            _dockerfile(folder, path, step)
        for path in sorted((folder / part).glob("*compose*.y*ml")):
            _compose(folder, path, step)
        for path in sorted((folder / part).glob("**/requirements*.txt")):
            _requirements(folder, path, step)


def _dockerfile(folder: Path, path: Path, step: Step) -> None:
    name = path.relative_to(folder).as_posix()
    agent = name.startswith("environment/")
    stages: set[str] = set()
    user = ""
    for line in parse_dockerfile(path.read_text("utf-8", "replace")):
        where = f"{name}:{line.number}"
        if line.word == "FROM":
            _base(line, where, stages, step)
        elif line.word in ("COPY", "ADD"):
            _copied(line, where, path, agent, step)
        elif line.word == "RUN":
            _command(line.rest, where, agent, step)
        elif line.word == "USER":
            user = line.rest
    if agent and user in ("root", "0"):
        step.add("root-agent", name, "the image ends as root", "warning")


def _base(line: Line, where: str, stages: set[str], step: Step) -> None:
    words = [word for word in line.rest.split() if not word.startswith("--")]
    if len(words) >= 3 and words[1].upper() == "AS":
        stages.add(words[2].lower())
    image = words[0] if words else ""
    if image.lower() in stages or image == "scratch":
        return
    if not re.search(r"@sha256:[0-9a-f]{64}$", image):
        step.add(
            "unpinned-image", where, f"FROM {image} can change tomorrow; write name@sha256:digest"
        )


def _copied(line: Line, where: str, path: Path, agent: bool, step: Step) -> None:
    try:
        *sources, _ = copy_words(line, path)
    except TaskError as error:
        step.add("bad-dockerfile", where, str(error))
        return
    for source in sources:
        if re.match(r"https?:|git@", source):
            step.add(
                "unpinned-download", where, f"{line.word} {source}: put the file into the task"
            )
        parts = [part for part in re.split(r"[/\\]", source) if part not in ("", ".")]
        if agent and ".." in parts:
            step.add(
                "leaky-image", where, f"{source} leaves environment/, towards tests and solution"
            )
        if agent and parts and (parts[0] in _SECRET_PARTS or _GIVEAWAY.search(source)):
            rule = "tests-in-image" if parts[0] == "tests" else "oracle-in-image"
            step.add(
                rule, where, f"{line.word} {source}: the agent could read it; keep it out of the "
                "agent's image"
            )  # fmt: skip


def _command(command: str, where: str, agent: bool, step: Step) -> None:
    if _PIPED.search(command):
        step.add("unpinned-download", where, "runs a script straight from the network; ship a copy")
    for match in _UNPINNED_PIP.finditer(command):
        words = match["what"].split()
        loose = [
            word
            for word in words
            if not word.startswith(("-", ".", "/"))
            and "==" not in word
            and "@" not in word
            and not word.endswith((".txt", ".whl"))
        ]
        if loose:
            step.add(
                "unpinned-dependency", where, f"pip install {' '.join(loose)}: write name==version"
            )
    if re.search(r"\bgit\s+clone\b", command) and agent:
        rewinds = re.search(r"rm\s+-rf?\s+\S*\.git\b", command)
        step.add(
            "git-history" if not rewinds else "unpinned-download",
            where,
            "clones a repository: its history and upstream may hold the fix; copy a snapshot "
            "without .git",
            "error" if not rewinds else "warning",
        )


def _compose(folder: Path, path: Path, step: Step) -> None:
    name = path.relative_to(folder).as_posix()
    try:
        data = yaml.safe_load(path.read_text("utf-8", "replace"))
    except yaml.YAMLError as error:
        step.add("bad-compose", name, f"not valid YAML: {error}")
        return
    services = data.get("services", {}) if isinstance(data, dict) else {}
    for service, settings in services.items() if isinstance(services, dict) else ():
        if not isinstance(settings, dict):
            continue
        where = f"{name}: services.{service}"
        image = settings.get("image")
        if isinstance(image, str) and "build" not in settings and "@sha256:" not in image:
            step.add("unpinned-image", where, f"image {image} can change tomorrow; add its digest")
        risky = [key for key in ("privileged", "cap_add", "devices") if settings.get(key)]
        risky += [f"{key}: host" for key in ("network_mode", "pid", "ipc")
                  if settings.get(key) == "host"]  # fmt: skip
        if risky:
            step.add("privileged-container", where, f"asks for {', '.join(risky)}; remove it")
        build = settings.get("build")
        context = build.get("context", ".") if isinstance(build, dict) else build
        if isinstance(context, str) and ".." in Path(context).parts:
            step.add("leaky-image", where, f"build context {context} holds tests and solution")
        for volume in settings.get("volumes", []):
            source = volume.get("source", "") if isinstance(volume, dict) else str(volume)
            if "docker.sock" in source:
                step.add("privileged-container", where, "mounts the Docker socket")
            if re.search(r"(^|/)(tests|solution|attacks)(/|:|$)", source):
                step.add("tests-in-image", where, f"mounts {source} where the agent can reach it")
            elif source.startswith(".."):
                step.add("leaky-image", where, f"mounts {source}, outside environment/")


def _requirements(folder: Path, path: Path, step: Step) -> None:
    name = path.relative_to(folder).as_posix()
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text and not text.startswith("-") and "==" not in text and "@" not in text:
            step.add("unpinned-dependency", f"{name}:{number}", f"{text}: write name==version")


def lint_context(folder: Path, step: Step) -> None:
    """Files that the agent gets and that give the task away: by name, or by being a copy."""
    secrets = {
        path.relative_to(folder).as_posix(): _text(path)
        for part in _SECRET_PARTS
        for path in sorted((folder / part).rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }
    code = solution_code(folder)
    agent_files = [
        path
        for part in ("environment", "tools", "cassettes")
        for path in sorted((folder / part).rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    ]
    for path in agent_files:
        name = path.relative_to(folder).as_posix()
        inner = path.relative_to(folder).as_posix().partition("/")[2]
        if name.startswith("environment/") and (
            _GIVEAWAY.search(inner) or inner.split("/")[0] in _SECRET_PARTS
        ):
            rule = "tests-in-image" if re.search(r"(?i)test|verif|grade|check", inner) else (
                "oracle-in-image")  # fmt: skip
            step.add(rule, name, "by its name it belongs to tests/ or solution/, yet the agent "
                     "gets it")  # fmt: skip
        if ".git" in path.relative_to(folder).parts:
            step.add("git-history", name, "history may hold the fix; ship a snapshot without .git")
        copied = copy_of(_text(path), secrets)
        if copied is not None:
            rule = "tests-in-image" if copied.startswith("tests/") else "oracle-in-image"
            step.add(rule, name, f"is (nearly) a copy of {copied}, yet the agent gets it")
        elif shared := shared_code(name, _text(path), code):
            step.add("oracle-in-image", name, f"holds most of the code of {shared} with other "
                     "names or constants, yet the agent gets it")  # fmt: skip
    if (folder / "environment" / ".git").exists():
        step.add("git-history", "environment/.git", "history may hold the fix; ship a snapshot")


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_BYTES:
        return ""
    return path.read_text("utf-8", "replace")


def copy_of(text: str, secrets: dict[str, str]) -> str | None:
    """The secret file that ``text`` repeats: whole, or (code) most of its telling lines in any
    order. Data may resemble the expected end state, so only a whole copy of it counts."""
    lines = _telling(text)
    for name, secret in secrets.items():
        if len(secret.strip()) >= 40 and secret.strip() in text:
            return name
        if name.endswith(_DATA_SUFFIXES):
            continue
        wanted = _telling(secret)
        if len(wanted) >= 4 and len(wanted & lines) >= SIMILAR * len(wanted):
            return name
    return None


def _telling(text: str) -> set[str]:
    """Lines long enough not to be shared by chance."""
    return {
        " ".join(line.split())
        for line in text.splitlines()
        if len(line.strip()) >= 12 and not line.lstrip().startswith(("#", "import ", "from "))
    }
