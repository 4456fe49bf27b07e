"""The shell world: Dockerfiles read, paths translated, artifacts collected, rewards read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandbox.check.episodes import Played, open_stage
from sandbox.check.scripts import Script
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.fakes import MemoryLeases
from sandbox.manifest.native import load_native
from sandbox.session import RawCall
from sandbox.shell.dockerfile import parse_dockerfile, read_recipe
from sandbox.shell.rebase import rebased
from sandbox.shell.runner import main as run_tests
from sandbox.task import load_task
from sandbox.templates.new import write_task
from tests.sandbox.conftest import best_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task", "acme/task", "bash")


def play(folder: Path, *commands: str, final_text: str = "") -> Played:
    """One episode of shell commands."""
    best_level()
    loaded = load_task(folder)
    rounds = tuple((RawCall("bash", json.dumps({"command": text})),) for text in commands)

    async def go() -> Played:
        async with open_stage(loaded.spec, loaded.bundle, SandboxConfig(), MemoryLeases()) as stage:
            return await stage.play(loaded.spec, Script("test", rounds, final_text))

    return asyncio.run(go())


def judged_by(folder: Path, script: str) -> Path:
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\n" + script)
    return folder


def test_instructions_and_continued_lines():
    text = '# c\nFROM a AS b\nRUN x \\\n  # inside\n  y\n\nCOPY ["a b", "/app/"]\n'
    lines = parse_dockerfile(text)
    assert [(line.number, line.word) for line in lines] == [(2, "FROM"), (3, "RUN"), (7, "COPY")]
    assert lines[1].rest.split() == ["x", "y"]


def test_what_a_box_can_do_of_a_dockerfile(tmp_path: Path):
    """Files and plain commands yes; installing no, and it says so."""
    path = tmp_path / "Dockerfile"
    path.write_text(
        "FROM x\nWORKDIR /app\nENV A=1 B='2 3'\nCOPY a.txt b/\nCOPY --chown=1 c /data/c\n"
        "RUN apt-get install -y jq\nRUN echo hi > /app/hi\nHEALTHCHECK none\n"
    )
    recipe = read_recipe(path)
    assert recipe.workdir == "/app" and recipe.env == {"A": "1", "B": "2 3"}
    assert recipe.copies == [("a.txt", "/app/b/"), ("c", "/data/c")]
    assert recipe.run == ["cd /app && echo hi > /app/hi"]
    assert any("apt-get install -y jq is skipped" in note for note in recipe.notes)
    assert any("HEALTHCHECK is ignored" in note for note in recipe.notes)


def test_variables_and_here_documents_are_those_of_a_build(tmp_path: Path):
    """ENV expands what ARG and ENV set; RUN with a here-document is a script."""
    path = tmp_path / "Dockerfile"
    path.write_text(
        "ARG V=1\nFROM x:${V}\nENV A=/data B=${A:-none} PATH=/x:$PATH\nENV C=$A/lib\n"
        "RUN <<EOF\necho 1\necho 2\nEOF\nRUN cat <<'END' > /app/x\n$A\nEND\nWORKDIR /data\n"
    )
    recipe = read_recipe(path)
    assert recipe.env["A"] == "/data" and recipe.env["B"] == "none"
    assert recipe.env["C"] == "/data/lib" and recipe.env["PATH"].startswith("/x:/usr/local/sbin:")
    assert recipe.run == [
        "cd /app && echo 1\necho 2", "cd /app && cat <<'END' > /app/x\n$A\nEND"]  # fmt: skip
    assert recipe.workdir == "/data" and "image x:1 is not used" in recipe.notes[0]


DOCKERFILE = """# syntax=docker/dockerfile:1
ARG BASE=python:3
FROM ${BASE} AS one
RUN --mount=type=cache,target=/c echo 1 && \\
    echo 2
RUN cat <<EOF > /x
$HOME
EOF
FROM scratch
COPY --link --from=one /x /x
COPY --from=tools:2 /y /y
"""


def test_a_dockerfile_is_rewritten_for_the_builder_here(tmp_path: Path):
    """Local bases, a label in each stage, and every step knows its line."""
    path = tmp_path / "Dockerfile"
    made = rebased(path, DOCKERFILE, lambda name: f"sha256:{name}", "a=1")
    assert made.bases == {"python:3": "sha256:python:3", "tools:2": "sha256:tools:2"}
    assert made.text.splitlines() == [
        "ARG BASE=python:3", "FROM sha256:python:3 AS one", "LABEL a=1",
        "RUN echo 1 &&      echo 2",
        r'RUN ["/bin/sh", "-c", "cat <<EOF > /x\n$HOME\nEOF"]', "FROM scratch", "LABEL a=1",
        "COPY --from=one /x /x", "COPY --from=sha256:tools:2 /y /y"]  # fmt: skip
    numbers = [None if line is None else line.number for line in made.lines]
    assert numbers == [2, 3, None, 4, 6, 9, None, 10, 11]
    for line, said in (
        ("RUN --mount=type=secret,id=k true", r"Dockerfile:2: RUN --mount is BuildKit's"),
        ("COPY --chmod=755 a /a", r"Dockerfile:2: COPY --chmod is BuildKit's"),
        ("COPY <<E /a\nx\nE", r"Dockerfile:2: COPY of a here-document"),
    ):
        with pytest.raises(TaskError, match=said):
            rebased(path, f"FROM x\n{line}\n", str, "a=1")
    with pytest.raises(TaskError, match="no FROM line"):
        rebased(path, "RUN true\n", str, "a=1")


def test_the_image_s_variables_and_files_hold_at_verification(folder: Path):
    """PATH and PYTHONPATH of the image, folders translated, tests beside each other."""
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(
        dockerfile.read_text() + "ENV PYTHONPATH=/data/a:/data/b PATH=/data/bin:$PATH COLOUR=blue\n"
        "RUN mkdir -p /data/a /data/b /data/bin && echo 'X = 1' > /data/a/first.py && "
        "echo 'Y = 2' > /data/b/second.py && printf '#!/bin/sh\\necho $COLOUR' > "
        "/data/bin/colour && chmod +x /data/bin/colour\n"
    )
    (folder / "tests" / "beside.py").write_text("Z = 3\n")
    (folder / "tests" / "t.py").write_text(
        "import beside, first, second, subprocess\n"
        "said = subprocess.run(['colour'], capture_output=True, text=True).stdout.strip()\n"
        "print(first.X + second.Y + beside.Z, said)\n"
    )
    script = 'said=$(python3 /tests/t.py); echo $said; [ "$said" = "6 blue" ] && r=1 || r=0; '
    played = play(judged_by(folder, f"{script} echo $r > /logs/verifier/reward.txt"))
    assert played.verdict.correctness == 1.0, played.verdict


def test_a_missing_source_and_a_system_folder_are_refused(folder: Path):
    dockerfile = folder / "environment" / "Dockerfile"
    text = dockerfile.read_text()
    dockerfile.write_text(text + "COPY nothing.txt /app/\n")
    with pytest.raises(TaskError, match=r"COPY nothing.txt: no such file"):
        load_task(folder)
    dockerfile.write_text(text + "COPY data /etc/data\n")
    with pytest.raises(TaskError, match=r"writes to /etc, which is read-only"):
        load_task(folder)


def test_folders_have_their_own_names_inside(folder: Path):
    """Commands, files that scripts read, and answers all say /app."""
    seen = play(
        folder,
        "pwd; ls /app; cat > /app/where.py <<'X'\nprint(open('/app/logs-in/web-1.log').name)\nX\n"
        "python3 /app/where.py; cat /app/where.py; exit 3",
    ).observations[0]
    assert seen.text.splitlines() == [
        "/app", "logs-in", "/app/logs-in/web-1.log",
        "print(open('/app/logs-in/web-1.log').name)", "[exit status 3]"]  # fmt: skip


def test_tests_and_solution_are_not_in_the_agent_s_box(folder: Path):
    text = play(
        folder, "cat /tests/* /solution/* 2>&1; find / -name judge.py 2>/dev/null"
    ).observations
    assert "WANTED" not in text[0].text and "judge.py" not in text[0].text


def test_commands_behind_alternatives_are_there(folder: Path):
    """/usr/bin/awk and others are links through /etc on Debian."""
    command = "printf '20\\n22\\n' | awk '{s+=$1} END{print s}'; which awk; ls /etc"
    seen = play(folder, command).observations[0].text.splitlines()
    assert seen[:2] == ["42", "/usr/bin/awk"] and set(seen[2:]) <= {"alternatives"}


def test_a_folder_is_no_file(folder: Path):
    """The refusal names the path as the task does."""
    best_level()
    loaded = load_task(folder)
    call = RawCall("write_file", json.dumps({"path": "/app", "content": "x"}))

    async def go() -> Played:
        async with open_stage(loaded.spec, loaded.bundle, SandboxConfig(), MemoryLeases()) as stage:
            return await stage.play(loaded.spec, Script("test", ((call,),), ""))

    seen = asyncio.run(go()).observations[0].text
    assert "/app cannot be written: Is a directory" in seen and "/box" not in seen


@pytest.mark.parametrize("words", ["python3 -m pytest", "python -B -mpytest"])
def test_pytest_runs_as_command_and_as_module(folder: Path, words: str):
    """A pytest.py of the agent in the working directory changes nothing."""
    (folder / "tests" / "test_x.py").write_text(
        "from pathlib import Path\n\ndef test_x():\n    assert Path('/app/report.json').is_file()\n"
    )
    script = f"{words} /tests/test_x.py -q && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    forged = "echo 'raise SystemExit(0)' > /app/pytest.py"
    judged_by(folder, f"cd /app; {script}")
    assert play(folder, "echo 1 > /app/report.json").verdict.correctness == 1.0
    assert play(folder, forged).verdict.correctness == 0.0


def test_reasons_name_no_folder_of_the_box(folder: Path):
    """A failed test and a failed script say /app and /tests."""
    script = "cat /app/none.json; cat /logs/x; pwd; echo 0 > /logs/verifier/reward.txt"
    reason = play(judged_by(folder, script)).verdict.reasons[0]
    assert reason.split("\\n") == [
        "cat: /app/none.json: No such file or directory",
        "cat: /logs/x: No such file or directory", "/app"]  # fmt: skip
    failing = "from pathlib import Path\n\ndef test_x():\n    Path('/app/none').read_text()\n"
    (folder / "tests" / "test_x.py").write_text(failing)
    script = "pytest /tests/test_x.py; echo 0 > /logs/verifier/reward.txt"
    reason = play(judged_by(folder, script)).verdict.reasons[0]
    assert "No such file or directory: '/app/none'" in reason and "/box" not in reason


@pytest.mark.parametrize(
    ("script", "correctness", "error"),
    [
        ("echo '{\"reward\": 0.25}' > /logs/verifier/reward.json", 0.25, None),
        ("echo 1 > /logs/verifier/reward.txt", 1.0, None),
        ("echo '{\"only\": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt",
         1.0, None),
        ("echo NaN > /logs/verifier/reward.txt", None, "finite number"),
        ("echo 1e309 > /logs/verifier/reward.txt", None, "finite number"),
        ("echo 2 > /logs/verifier/reward.txt", None, r"expected \[0, 1\]"),
        ("echo good > /logs/verifier/reward.txt", None, "expected a number"),
        ("echo '{\"a\": 1, \"b\": 0}' > /logs/verifier/reward.json", None, "'reward' or a single"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", None, "no reward.json or reward.txt"),
        ("exit 1", None, "no reward.json or reward.txt"),
        ("[ \"$(cat /logs/agent/answer.txt)\" = yes ] && echo 1 > /logs/verifier/reward.txt", 1.0,
         None),
    ],
)  # fmt: skip
def test_rewards_are_read_as_harbor_does_and_never_made_up(
    folder: Path, script: str, correctness: float | None, error: str | None
):
    """json before txt; what is no finite number in [0, 1] is an error of the verifier, not 0."""
    verdict = play(judged_by(folder, script), final_text="yes").verdict
    assert verdict.correctness == correctness
    assert (verdict.error is None) == (error is None)
    if error is not None:
        import re

        assert re.search(error, str(verdict.error)), verdict.error


def test_links_and_tests_of_the_agent_do_not_travel(folder: Path):
    """Only regular files below the declared artifacts reach the verifier."""
    script = (
        "if [ -e /app/report.json ] || [ -e /app/other ]; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt"
    )
    command = (
        "ln -s /etc/passwd /app/report.json; echo x > /app/other; mkdir -p /tests /logs/verifier; "
        "echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh"
    )
    assert play(judged_by(folder, script), command).verdict.correctness == 0.0


def test_too_many_artifacts_score_nothing(folder: Path):
    """A full box is the policy's doing: 0, not an error."""
    played = play(folder, "head -c 6000000 /dev/zero > /app/report.json")
    assert played.verdict.correctness == 0.0
    assert "larger than the limit" in played.verdict.reasons[0]


def test_a_background_process_does_not_hold_an_answer_back(folder: Path):
    """Its open output is not waited for."""
    played = play(folder, "(sleep 30; echo late) & echo now")
    assert played.observations[0].text == "now" and played.elapsed_s < 10


def test_multi_step_tasks_and_bad_sizes_are_refused(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text('version = "1.0"\n[[steps]]\nname = "a"\n')
    with pytest.raises(TaskError, match=r"several steps"):
        load_native(path)
    path.write_text('version = "1.0"\n[environment]\nmemory = "much"\n')
    with pytest.raises(TaskError, match=r"expected a size like '2G'"):
        load_native(path)


def test_the_small_runner_runs_what_tests_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Fixtures, parametrize, raises, approx, classes; a failure and a broken file fail."""
    good = tmp_path / "test_good.py"
    good.write_text(
        "import pytest\n\n@pytest.fixture\ndef one():\n    yield 1\n\n"
        "@pytest.mark.parametrize('a, b', [(1, 2), (2, 3)])\ndef test_pairs(a, b, one):\n"
        "    assert a + one == b\n\nclass TestX:\n    def test_raises(self, tmp_path):\n"
        "        with pytest.raises(ValueError, match='bad'):\n"
        "            raise ValueError('bad')\n"
        "        assert tmp_path.is_dir() and 0.1 + 0.2 == pytest.approx(0.3)\n"
    )
    real = __import__("sys").modules["pytest"]
    try:
        assert run_tests([str(good), "-rA"]) == 0
        (tmp_path / "test_bad.py").write_text("def test_no():\n    assert 1 == 2\n")
        assert run_tests([str(tmp_path)]) == 1
        (tmp_path / "test_bad.py").write_text("import nothing_here\n")
        assert run_tests([str(tmp_path / "test_bad.py")]) == 1
        assert run_tests([str(tmp_path / "none.txt")]) == 1
    finally:
        __import__("sys").modules["pytest"] = real
    out = capsys.readouterr().out
    assert out.count("PASSED") == 6 and "FAILED test_bad.py::test_no" in out
