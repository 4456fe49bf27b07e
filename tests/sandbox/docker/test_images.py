"""Harbor tasks in their own images: built offline, hardened, judged apart, nothing left behind."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parl.cli import main as cli
from sandbox.backends import docker_engine as engine
from sandbox.backends.base import Level
from sandbox.backends.choice import open_backend
from sandbox.backends.docker_build import LABEL, reap_unused
from sandbox.backends.docker_image import rootfs
from sandbox.backends.docker_task_image import REPOSITORY
from sandbox.check.episodes import Played, open_stage
from sandbox.check.scripts import NOP, Script, oracle_of
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, TaskError
from sandbox.fakes import MemoryLeases
from sandbox.imaged import load_for
from sandbox.session import RawCall
from sandbox.task import LoadedTask
from tests.sandbox.conftest import need

pytestmark = pytest.mark.docker
FORMATS = Path(__file__).parents[2] / "data" / "formats" / "harbor"
WHOLE, BARE = "parl-test-base:whole", "parl-test-base:bare"
"""What stands for python:3.12-slim and for an image without any Python."""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """An engine with two base images, made from files of this machine; both go at the end, with
    every image that tests built."""
    need(Level.DOCKER)
    with engine.connected() as connected:
        files = rootfs(own_tmp=True)
        for name, content in ((WHOLE, files), (BARE, _without_python(files))):
            repository, _, tag = name.partition(":")
            connected.api.import_image_from_data(content, repository=repository, tag=tag)
        before = _tags(connected)
        yield connected
        for tag in _tags(connected) - before:
            engine.remove_image(connected, tag)
        for name in (WHOLE, BARE):
            connected.api.remove_image(name, force=True)


def _tags(client: Any) -> set[str]:
    return {tag for image in client.api.images(name=REPOSITORY) for tag in image["RepoTags"] or []}


def _without_python(files: bytes) -> bytes:
    kept = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(files)) as old,
        tarfile.open(fileobj=kept, mode="w") as new,
    ):
        for member in old:
            if "python3" not in member.name:
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return kept.getvalue()


def boxes(**docker: Any) -> SandboxConfig:
    bases = {"python:3.12-slim": WHOLE, "ubuntu:24.04": WHOLE, "debian:bookworm": BARE}
    return SandboxConfig(
        level="docker",
        max_processes=64,
        max_open_files=256,
        docker={"base_images": bases, **docker},  # pyright: ignore[reportArgumentType]
    )


def write(folder: Path, dockerfile: str, test: str, more: str = "", **files: str) -> Path:
    """A plain Harbor task; ``files``: more text by path with __ for the slashes."""
    texts = {
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        "instruction.md": "Do it.\n",
        "solution/solve.sh": "true\n",
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "example/made"\n'
        '[environment]\nnetwork_mode = "no-network"\n' + more,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def play(loaded: LoadedTask, *scripts: Script) -> list[Played]:
    """Episodes in one box after another's, as a pool lends it."""

    async def go() -> list[Played]:
        async with open_stage(loaded.spec, loaded.bundle, boxes(), MemoryLeases()) as stage:
            return [await stage.play(loaded.spec, script) for script in scripts]

    return asyncio.run(go())


def bash(*commands: str) -> Script:
    rounds = tuple((RawCall("bash", json.dumps({"command": text})),) for text in commands)
    return Script("test", rounds)


@pytest.mark.parametrize("name", ["hello", "totals"])
def test_a_harbor_folder_runs_unchanged_in_its_image(name: str, client: Any):
    """Oracle, nothing, and the oracle again in the same box."""
    loaded = load_for(FORMATS / name, boxes())
    oracle = oracle_of(FORMATS / name, loaded.spec)
    played = play(loaded, oracle, NOP, oracle)
    assert [one.verdict.correctness for one in played] == [1.0, 0.0, 1.0], played


MADE = """FROM python:3.12-slim
ENV COLOUR=blue PYTHONPATH=/data
WORKDIR /srv/work
RUN echo made > built.txt && mkdir /data && echo 7 > /data/seven && chmod 600 /data/seven \\
    && mkdir -p /opt/tool && echo 'echo tool' > /opt/tool/run && chmod 755 /opt/tool/run
USER {user}
"""
LOOK = (
    "pwd; cat built.txt; echo $COLOUR $PYTHONPATH; id -u; cat /data/seven; /opt/tool/run; echo x > "
    "built.txt && cat built.txt; echo y > /tmp/y; touch /etc/z 2>&1; ls /proc/1/root 2>&1 | head -1"
)


@pytest.fixture(scope="module")
def made(client: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedTask:
    test = "ls /tmp/y /srv/work; [ -e /tmp/y ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    folder = tmp_path_factory.mktemp("made")
    return load_for(write(folder, MADE.format(user="root"), test), boxes())


def test_the_image_s_files_folder_and_variables_hold_and_its_root_is_nobody(made: LoadedTask):
    """A copy for each episode: what one writes, the next does not see."""
    first, second = play(made, bash(LOOK), bash(LOOK, "ls -a /tmp /srv/work"))
    for played in (first, second):
        lines = played.observations[0].text.splitlines()
        assert lines[:3] == ["/srv/work", "made", "blue /data"]
        assert int(lines[3]) >= 200_000 and lines[4:7] == ["7", "tool", "x"]
        assert "Read-only file system" in lines[7]
    assert "y" in second.observations[1].text.split()


def test_the_verifier_sees_artifacts_only(made: LoadedTask):
    """Not /tmp of the agent, not its reward file; its artifacts replace the image's files."""
    plant = (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo z > /tmp/y; rm built.txt"
    )
    played = play(made, bash(plant, "echo 1 > made.txt"))[0]
    assert played.verdict.correctness == 0.0
    said = played.verdict.reasons[0]
    assert "made.txt" in said and "built.txt" not in said


def test_the_profile_is_the_hardened_one(made: LoadedTask, client: Any):
    """As for a box of the base image, and memory for the copies; no volume but PARL's Python."""

    async def go() -> dict[str, Any]:
        async with open_stage(made.spec, made.bundle, boxes(), MemoryLeases()) as stage:
            session = await stage._pool.acquire(made.spec)
            state = client.api.inspect_container(session._box.container_id)  # type: ignore[attr-defined]
            state["enforced"] = session.enforced
            await session.close()
            return state

    state = asyncio.run(go())
    host, image = state["HostConfig"], made.bundle.image
    assert image is not None and state["Config"]["Image"] == image.reference
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
    assert host["NetworkMode"] == "none" and host["SecurityOpt"] == ["no-new-privileges:true"]
    assert {"/box", "/srv", "/data", "/tmp", "/logs"} <= set(host["Tmpfs"])
    assert all("size=" in options and "nodev" in options for options in host["Tmpfs"].values())
    assert [(m["Destination"], m["RW"]) for m in state["Mounts"]] == [("/.parl", False)]
    assert state["enforced"]["memory_bytes"] == (1024 + image.seed_mib) << 20
    assert state["enforced"]["network"] == "none"


def test_a_user_of_the_image_is_kept(client: Any, tmp_path: Path):
    """With what it may read, and no more; an image needs no Python and no bash for it."""
    dockerfile = (
        "FROM debian:bookworm\nWORKDIR /app\n"
        "COPY --chown=1234:77 own /app/own\n"
        "RUN echo 2 > /app/roots && chmod 600 /app/roots /app/own\nUSER 1234:77\n"
    )
    test = "cat own; echo 1 > /logs/verifier/reward.txt"
    folder = write(tmp_path, dockerfile, test, environment__own="1\n")
    loaded = load_for(folder, boxes())
    played = play(loaded, bash("id -u; id -g; cat own; cat roots; command -v python3"))[0]
    assert played.observations[0].text.splitlines()[:3] == ["1234", "77", "1"]
    assert "roots" in played.observations[0].text and "2" not in played.observations[0].text.split()
    assert played.verdict.correctness == 1.0


def test_tests_dockerfile_is_the_verifier_s_own_image(client: Any, tmp_path: Path):
    folder = write(
        tmp_path,
        "FROM python:3.12-slim\nWORKDIR /app\n",
        "[ -f /grader/key ] && cmp -s /app/a /grader/key && r=1 || r=0; echo $r > "
        "/logs/verifier/reward.txt",
        tests__Dockerfile="FROM python:3.12-slim\nRUN mkdir /grader && echo sesame > /grader/key\n",
    )
    loaded = load_for(folder, boxes())
    right, wrong = play(loaded, bash("echo sesame > a; ls /grader"), bash("echo open > a"))
    assert "No such file" in right.observations[0].text
    assert [right.verdict.correctness, wrong.verdict.correctness] == [1.0, 0.0]


def test_builds_are_cached_by_content(client: Any, tmp_path: Path):
    """The same content, another folder: the same image, at once. One byte more: another."""
    first = load_for(FORMATS / "totals", boxes()).bundle.image
    copied = tmp_path / "totals"
    shutil.copytree(FORMATS / "totals", copied)
    begin = time.monotonic()
    assert load_for(copied, boxes()).bundle.image == first
    assert time.monotonic() - begin < 5.0
    with (copied / "environment" / "sales.csv").open("a") as file:
        file.write("west,cup,1\n")
    assert load_for(copied, boxes()).bundle.image != first


def leftovers(client: Any) -> tuple[int, int]:
    """Untagged layers and containers of builds."""
    images = client.api.images(filters={"label": LABEL, "dangling": True})
    containers = client.api.containers(all=True, filters={"label": LABEL})
    return len(images), len([c for c in containers if engine.LABEL_BOX not in c["Labels"]])


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ("RUN echo 1 > /a\nRUN curl -fsS https://example.org/x\n", "",
         r"Dockerfile:3: RUN curl .* exit status \d+ .*a build has no network.*docker.base_images"),
        ("RUN echo gone && exit 3\n", "",
         r"Dockerfile:2: RUN echo gone .* exit status 3 \(gone\)$"),
        ("RUN sleep 60\n", "build_timeout_sec = 1.0\n",
         r"Dockerfile:2: RUN sleep 60: not built within .*build_timeout_sec = 1 s"),
        ("COPY none.txt /app/\n", "", r"Dockerfile:2: COPY none.txt /app/: .*none.txt"),
        ("RUN --mount=type=secret,id=x true\n", "", r"Dockerfile:2: RUN --mount is BuildKit's"),
    ],
    ids=["network", "fails", "late", "no-source", "buildkit"],
)  # fmt: skip
def test_a_build_that_fails_is_one_line_and_leaves_nothing(
    lines: str, more: str, said: str, client: Any, tmp_path: Path
):
    folder = write(tmp_path, f"FROM python:3.12-slim\n{lines}", "true", more)
    before = leftovers(client)
    with pytest.raises(TaskError, match=said) as caught:
        load_for(folder, boxes())
    assert len(str(caught.value).splitlines()) == 1
    assert leftovers(client) == before


def test_an_absent_base_image_is_one_line(tmp_path: Path, client: Any):
    """Which one, and the two ways to have it."""
    folder = write(tmp_path, "ARG V=9\nFROM example.org/tools:${V} AS x\nFROM x\n", "true")
    with pytest.raises(BackendUnavailable, match=r"'example.org/tools:9' is not on this") as caught:
        load_for(folder, boxes())
    text = str(caught.value)
    assert "docker load" in text and 'docker.base_images = { "example.org/tools:9"' in text
    assert len(text.splitlines()) == 1
    with pytest.raises(BackendUnavailable, match="mapped to 'none:1', is not on this engine"):
        load_for(folder, boxes(base_images={"example.org/tools:9": "none:1"}))


def test_an_image_by_name_needs_no_build(client: Any, tmp_path: Path):
    """docker_image wins where it is there; else its Dockerfile is built, and that is said."""
    more = 'docker_image = "ubuntu:24.04"\n'
    folder = write(tmp_path, "FROM python:3.12-slim\nRUN echo 1 > /built\n", "true", more)
    assert "No such" in play(load_for(folder, boxes()), bash("cat /built"))[0].observations[0].text
    other = boxes(base_images={"python:3.12-slim": WHOLE})
    loaded = load_for(folder, other)
    assert any("docker_image ubuntu:24.04 is not on this engine" in note for note in loaded.notes)


def test_unused_images_are_reaped(made: LoadedTask, client: Any):
    """One used now stays, one not used for long goes; the name is another's, not to take its."""
    image, other = made.bundle.image, f"{REPOSITORY}-test"
    assert image is not None
    client.api.tag(image.reference, other, "old")
    reap_unused(client, other, keep_days=1.0)
    assert client.images.get(f"{other}:old")
    time.sleep(1.1)
    reap_unused(client, other, keep_days=1e-6)
    assert not client.api.images(name=other) and client.images.get(image.reference)


def test_a_killed_build_leaves_nothing_once_a_backend_opens(client: Any, tmp_path: Path):
    """The engine ends the step with its connection; the layers below are reaped."""
    folder = write(tmp_path, "FROM python:3.12-slim\nRUN echo killed\nRUN sleep 90\n", "true")
    code = (
        "import sys; from pathlib import Path; from sandbox.config import SandboxConfig\n"
        "from sandbox.imaged import load_for\n"
        "load_for(Path(sys.argv[1]), SandboxConfig.model_validate_json(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(folder), boxes().model_dump_json()]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as building:
        deadline = time.monotonic() + 60
        while not any("sleep" in c["Command"] for c in client.api.containers()):
            assert time.monotonic() < deadline and building.poll() is None, "no step runs"
            time.sleep(0.05)
        building.kill()
    deadline = time.monotonic() + 20
    while leftovers(client) != (0, 0):
        assert time.monotonic() < deadline, leftovers(client)
        open_backend(Level.DOCKER, boxes())
        time.sleep(0.2)


def test_the_command_runs_a_task_in_its_image_or_says_that_it_does_not(
    client: Any, capsys: pytest.CaptureFixture[str]
):
    folder = str(FORMATS / "totals")
    words = ["task", "run", folder, "--backend", "docker", "--base-image"]
    assert cli.run([*words, f"python:3.12-slim={WHOLE}"]) == 0
    assert "backend docker, image parl-task:" in capsys.readouterr().err
    assert cli.run([*words, "python:3.12-slim=none:1"]) == 1
    assert "mapped to 'none:1', is not on this engine" in capsys.readouterr().err
