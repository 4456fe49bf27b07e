"""How to break the example of `parl task new`: building blocks of the planted flaws."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.proxy.cassette import Cassette
from sandbox.proxy.result import Reply
from sandbox.proxy.scrub import Scrubber


@dataclass(frozen=True)
class Flaw:
    """``rule``: the name it must be found by. ``static``: seen without running anything."""

    name: str
    rule: str
    family: str
    plant: Callable[[Path], object]
    static: bool = True


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def verifier(body: str) -> Callable[[Path], None]:
    """Replace tests/verify.py."""

    def plant(folder: Path) -> None:
        text = "def verify(final_text, end_state, data):\n" + body
        (folder / "tests" / "verify.py").write_text(text)

    return plant


def test_script(text: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / "tests" / "test.sh").write_text("#!/bin/bash\n" + text)

    return plant


def dockerfile(line: str) -> Callable[[Path], None]:
    return lambda folder: append(folder / "environment" / "Dockerfile", line + "\n")


def manifest(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "task.toml", old, new)


def unpin(folder: Path) -> None:
    path = folder / "environment" / "Dockerfile"
    path.write_text(path.read_text().split("@sha256")[0] + "\nWORKDIR /app\n")


def copy_solution(folder: Path) -> None:
    shutil.copy(folder / "solution" / "calls.jsonl", folder / "environment" / "notes.txt")


def readable_oracle(folder: Path) -> None:
    """Under a harmless name and only in part, but in the box."""
    (folder / "environment" / "files").mkdir()
    text = (folder / "tests" / "verify.py").read_text()
    (folder / "environment" / "files" / "handbook.md").write_text("Read me.\n" + text)
    edit(
        folder / "tools" / "tools.py",
        "    _save(data)",
        '    (workdir() / "handbook.md").write_text(data.pop("files")["handbook.md"])\n'
        "    _save(data)",
    )


def answer_in_data(folder: Path) -> None:
    path = folder / "environment" / "data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expected": {"answer": "3"}}))


def answers_in_data(folder: Path) -> None:
    path = folder / "environment" / "data.json"
    answers = json.loads((folder / "tests" / "data.json").read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), "expected": answers}))


def nameless_answer(folder: Path) -> None:
    path = folder / "environment" / "data.json"
    meta = {"ids": ["o-103", "o-105"], "total": 3075}
    path.write_text(json.dumps({**json.loads(path.read_text()), "meta": meta}))


def link_out(folder: Path) -> None:
    (folder / "environment" / "extra.txt").symlink_to("/etc/hostname")


def writable_tests(folder: Path) -> None:
    (folder / "tests" / "verify.py").chmod(0o666)


def compose(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "environment" / "docker-compose.yaml").write_text(text)


def random_world(folder: Path) -> None:
    tools = folder / "tools" / "tools.py"
    edit(tools, "import json\n", "import json\nimport time\n")
    edit(tools, '    return "\\n".join(', '    return str(time.time_ns()) + "\\n".join(')


def replay_without_cassette(folder: Path) -> None:
    """A second source of tools behind the proxy, and an oracle that asks it first."""
    append(
        folder / "task.toml",
        '\n[metadata.parl.proxy.upstreams.prices]\nkind = "python"\nmode = "replay"\n'
        'source = "tools/prices.py"\ncassette = "cassettes/prices.jsonl"\n',
    )
    (folder / "tools" / "prices.py").write_text(
        "from sandbox.toolkit import tool\n\n\n"
        '@tool(effect="read")\ndef quote(item: str) -> int:\n'
        '    """The price of an item elsewhere, in cents."""\n    return 100 * len(item)\n'
    )
    calls = folder / "solution" / "calls.jsonl"
    asked = json.dumps({"name": "quote", "arguments": {"item": "lamp"}})
    calls.write_text(f"{asked}\n{calls.read_text()}")


def replay(arguments: object) -> Callable[[Path], None]:
    """One record of the tool, with these arguments."""

    def plant(folder: Path) -> None:
        replay_without_cassette(folder)
        cassette = Cassette(folder / "cassettes" / "prices.jsonl", Scrubber([]))
        cassette.path.parent.mkdir()
        cassette.record(
            upstream="prices",
            canonical={"python": "quote", "arguments": arguments},
            state="",
            occurrence=0,
            reply=Reply(b"400"),
            latency_s=0.1,
        )
        cassette.close()

    return plant


def damaged_cassette(folder: Path) -> None:
    replay({"item": "lamp"})(folder)
    edit(folder / "cassettes" / "prices.jsonl", '"body":"400"', '"body":"500"')


def passing_attack(folder: Path) -> None:
    shutil.copy(folder / "solution" / "calls.jsonl", folder / "attacks" / "other-way.jsonl")


def no_solution(folder: Path) -> None:
    (folder / "solution" / "calls.jsonl").unlink()


def follow_links(folder: Path) -> None:
    edit(
        folder / "tools" / "tools.py",
        "def end_state() -> dict[str, Any]:\n",
        "def end_state() -> dict[str, Any]:\n"
        '    note = workdir() / "output.txt"\n'
        '    return {**_load(), "note": note.read_text() if note.exists() else ""}\n\n\n'
        "def _unused() -> dict[str, Any]:\n",
    )


def reward_from_workdir(folder: Path) -> None:
    """end_state hands over a file that the agent's side writes; the verifier believes it."""
    edit(
        folder / "tools" / "tools.py",
        "def end_state() -> dict[str, Any]:\n",
        "def end_state() -> dict[str, Any]:\n"
        '    note = workdir() / "status.json"\n'
        "    return json.loads(note.read_text()) if note.exists() else {}\n\n\n"
        "def _unused() -> dict[str, Any]:\n",
    )
    verifier(
        "    value = dict(end_state)\n"
        "    good = any(value.get(key) is True for key in ('passed', 'x'))\n"
        "    return {'correctness': float(good), 'reasons': []}\n"
    )(folder)


def judge(old: str, new: str) -> Callable[[Path], None]:
    """Change tests/judge.py of the shell example."""
    return lambda folder: edit(folder / "tests" / "judge.py", old, new)


def answer_from_agent_files(folder: Path) -> None:
    """The verifier counts the logs itself, as the agent left them."""
    text = (folder / "tests" / "judge.py").read_text()
    wanted = next(line for line in text.splitlines() if line.startswith("WANTED"))
    judge(wanted, "import collections\n\nWANTED = collections.Counter(\n"
          "    line.split(maxsplit=2)[2]\n"
          "    for path in sorted(Path('/app/logs-in').glob('*.log'))\n"
          "    for line in path.read_text().splitlines()\n"
          "    if line.split()[1] == 'ERROR'\n)")(folder)  # fmt: skip
    manifest('["/app/report.json"]', '["/app/report.json", "/app/logs-in"]')(folder)


def packed_report(folder: Path) -> None:
    """The right report, compressed, among the logs."""
    target = folder / "environment" / "data" / ".cache" / "r.bin"
    target.parent.mkdir()
    target.write_bytes(gzip.compress(b'{"refused db-1": 1,\n "timeout db-2": 3}'))


def log_note(name: str, text: str) -> Callable[[Path], object]:
    """A file beside the logs that the agent reads."""
    return lambda folder: (folder / "environment" / "data" / name).write_text(text)


def judge_first(code: str) -> Callable[[Path], None]:
    """Code before the comparison of the shell example."""
    return judge("report = Path(", code + "\nreport = Path(")


def agent_module(folder: Path) -> None:
    """A test that imports beside the report."""
    test_script("cd /app && pytest /tests/test_report.py -q\n")(folder)
    (folder / "tests" / "test_report.py").write_text(
        'import sys\n\nAPP = "/app"\nsys.path.insert(0, APP)\ntry:\n'
        "    from settings import ROUND\nexcept ImportError:\n    ROUND = 0\n\n\n"
        "def test_it():\n    assert ROUND == 0\n"
    )


def tool_code(old: str, new: str, imports: str = "") -> Callable[[Path], None]:
    """Change tools/tools.py."""

    def plant(folder: Path) -> None:
        path = folder / "tools" / "tools.py"
        edit(path, "import json\n", f"import json\n{imports}")
        edit(path, old, new)

    return plant


def service(old: str, new: str, imports: str = "") -> Callable[[Path], None]:
    """Change the service of the HTTP example."""

    def plant(folder: Path) -> None:
        path = folder / "environment" / "files" / "service.py"
        edit(path, "import json\n", f"import json\n{imports}")
        edit(path, old, new)

    return plant


def another_read(body: str) -> Callable[[Path], None]:
    """A read that the solution does not call."""
    return tool_code(
        "def end_state()",
        '@tool(effect="read", idempotent=True)\ndef price_of(item: str) -> str:\n'
        f'    """Price of an item."""\n{body}\n\n\ndef end_state()',
    )


def no_attacks(folder: Path) -> None:
    """Without the author's own, which would find some of these."""
    shutil.rmtree(folder / "attacks", ignore_errors=True)


def both(*plants: Callable[[Path], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        for each in plants:
            each(folder)

    return plant


def refunds(condition: str) -> Callable[[Path], None]:
    """Judge the HTTP example's orders by another condition (true = wrong)."""
    return both(
        no_attacks,
        lambda folder: edit(
            folder / "tests" / "verify.py", "if states != wanted:", f"if {condition}:"
        ),
    )
