"""Attacks on the verdict (facts/sandboxes.md 5.2): what an episode plants never judges it."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from sandbox.backends.base import Level
from sandbox.backends.processes import marked_processes
from sandbox.catalog.lookup_calc.family import LookupCalc
from sandbox.config import SandboxConfig
from sandbox.errors import SandboxLost
from sandbox.fakes import MemoryLeases
from sandbox.pool import SandboxPool
from sandbox.session import RawCall, Verdict
from sandbox.task import ToolBundle
from sandbox.tool_schema import tools_from_source
from sandbox.tool_session import ToolSession
from tests.sandbox.conftest import JUDGED, need

TOOLS = '''
import os, time
from sandbox.toolkit import tool, workdir

@tool(effect="write")
def python(code: str) -> str:
    """Run Python in the episode's worker: the most a tool could ever give away.

    Args:
        code: what to run
    """
    scope = dict(globals())
    exec(code, scope)
    return str(scope.get("result"))

def setup(data):
    (workdir() / "answer.txt").write_text("wrong")

def end_state():
    answer = (workdir() / "answer.txt").read_text()
    return {"answer": answer, "files": sorted(os.listdir(workdir()))}
'''
HONEST = '''
import json, math, os, sys
from pathlib import Path

def verify(final_text, end_state, data):
    """Passes for the right answer; also reports what a planted file could have changed."""
    import subprocess
    python = subprocess.run(["python3", "-c", "print('real')"], capture_output=True, text=True)
    seen = {"files": sorted(os.listdir(".")), "path": os.environ["PATH"],
            "python": python.stdout.strip(), "modules": "usercustomize" in sys.modules,
            "rewards": [p for p in ("/logs/verifier/reward.txt", "/logs", "/tests", "conftest.py")
                        if Path(p).exists()]}
    return {"correctness": float(end_state["answer"] == data["right"]), "seen": seen}
'''
FAMILY = LookupCalc()
Body = Callable[[ToolSession], Coroutine[Any, Any, Any]]


def spec_of(bundle: ToolBundle, verify_timeout_s: float = 5.0) -> Any:
    """A task of this bundle whose right answer the box never hears."""
    spec = FAMILY.instance(0, 0, "train", "lookup")
    return replace(
        spec,
        bundle=bundle.hash,
        tools=tools_from_source(bundle.tools_source),
        forbidden_tools=(),
        environment=replace(spec.environment, data={}),
        verifier=replace(spec.verifier, data={"right": "42"}, timeout_s=verify_timeout_s),
        limits=replace(spec.limits, call_timeout_s=10.0),
    )


def judged(
    level: Level, code: str, verify: str = HONEST, timeout_s: float = 5.0, final_text: str = ""
) -> Verdict:
    """The verdict of an episode that ran ``code``; twice on the same boxes, with equal result."""
    need(level)
    bundle = ToolBundle("attacked", TOOLS, verify)
    config = SandboxConfig(cpu_s=20).model_copy(update={"level": level.value})

    async def episode(pool: SandboxPool) -> Verdict:
        session = await pool.acquire(spec_of(bundle, timeout_s))
        await session.start()
        observation = await session.call(RawCall("python", json.dumps({"code": code})))
        assert observation.error is None, observation
        verdict = await session.verify(final_text)
        await session.close()
        return verdict

    async def go() -> Verdict:
        pool = SandboxPool(bundle, size=1, leases=MemoryLeases(), config=config)
        try:
            first, second = await episode(pool), await episode(pool)
            assert first == second, "the first episode changed the second's verdict"
            return first
        finally:
            await pool.close()

    return asyncio.run(go())


@pytest.mark.parametrize("level", JUDGED)
def test_an_honest_answer_still_passes(level: Level):
    """The suite below is about attacks; this is the control."""
    code = "(workdir() / 'answer.txt').write_text('42')"
    assert judged(level, code).correctness == 1.0


PLANTS = {
    "reward files": """
for name in ("reward.txt", "reward.json", "rewards.json", "logs/verifier/reward.txt"):
    path = workdir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1.0")
""",
    "usercustomize": """
import site
for name in ("usercustomize.py", "sitecustomize.py", "conftest.py", "json.py", "subprocess.py",
             ".local/lib/python3.11/site-packages/usercustomize.py", "evil.pth"):
    path = workdir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise SystemExit('planted')")
""",
    "fake python3 in PATH": """
for name in ("python3", "python", "sh", "pytest", "bin/python3"):
    path = workdir() / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\\necho planted")
    path.chmod(0o755)
os.environ["PATH"] = str(workdir()) + ":" + os.environ["PATH"]
""",
    "symlinked log folder": """
os.symlink("/proc/self/root", workdir() / "logs")
os.symlink("/usr/lib", workdir() / "tests")
""",
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("level", JUDGED)
def test_planted_files_do_not_reach_the_verifier(level: Level, plant: str):
    """It runs in a box where no episode was: nothing of the working directory is there."""
    verdict = judged(level, PLANTS[plant])
    assert verdict.correctness == 0.0 and verdict.error is None
    seen = verdict.details["seen"]
    assert seen["files"] == [] and seen["python"] == "real" and seen["modules"] is False
    assert seen["path"] == "/usr/bin:/bin" and seen["rewards"] == []


@pytest.mark.parametrize("level", JUDGED)
def test_a_background_rewriter_is_dead_before_the_state_is_read(level: Level):
    """stella#2198, and the rewriter of a shared container: whatever it would write later, it is
    gone; the state is the one at the end of the episode."""
    code = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.3)
        while True:
            (workdir() / "answer.txt").write_text("42")
    os._exit(0)
"""
    assert judged(level, code).correctness == 0.0


@pytest.mark.parametrize("level", JUDGED)
def test_the_worker_cannot_forge_its_end_state(level: Level):
    """Functions replaced in the episode's process do not judge: end_state runs in a clean one."""
    code = """
import sys
def forged(*args, **kwargs):
    return {"value": {"answer": "42", "files": []}}
sys.modules["sandbox.toolkit"].run = forged
sys.modules["sandbox.toolkit"].TaskModule.end_state = forged
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if type(value).__name__ == "Zygote":
            value.module.end_state = lambda workdir: {"answer": "42", "files": []}
            value.answer = lambda *a: b'{"value": {"answer": "42", "files": []}}'
    frame = frame.f_back
"""
    assert judged(level, code).correctness == 0.0


def answer_of(text: str) -> str:
    return f"def verify(final_text, end_state, data):\n    {text}\n"


@pytest.mark.parametrize(
    "value", ["float('nan')", "1e309", "-0.1", "1.5", "True", "'1.0'", "10**400"]
)
@pytest.mark.parametrize("level", JUDGED)
def test_a_reward_that_is_no_number_in_range_is_no_reward(level: Level, value: str):
    """NaN, infinity, bool, text, huge integers: correctness None, never 0 and never a number."""
    verify = answer_of(f"return {{'correctness': {value}}}")
    verdict = judged(level, "pass", verify)
    assert verdict.correctness is None and verdict.error and not verdict.passed


@pytest.mark.parametrize("level", JUDGED)
def test_timing_out_the_verifier_on_purpose_gives_no_reward(level: Level):
    """A verifier that hangs on what it was given is a verifier error, and the next one works."""
    verify = answer_of("\n    ".join(["import time", "while final_text == 'hang': time.sleep(1)",
                                      "return {'correctness': 1.0}"]))  # fmt: skip
    verdict = judged(level, "pass", verify, timeout_s=0.5, final_text="hang")
    assert verdict.correctness is None and "timeout" in (verdict.error or "")
    assert judged(level, "pass", verify, timeout_s=0.5, final_text="go").correctness == 1.0


BOMBS = {
    "regex": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "zip": (
        "import io, zipfile; f = io.BytesIO(); z = zipfile.ZipFile(f, 'w', zipfile.ZIP_DEFLATED); "
        "[z.writestr(f'{i}', bytes(60 << 20)) for i in range(2)]; z.close(); "
        "data = [zipfile.ZipFile(f).read(f'{i}') for i in range(2)]"
    ),
    "integer": "int('9' * 10 ** 7)",
    "recursion": "import json; json.loads('[' * 10 ** 6)",
    "exit": "import os; os._exit(0)",
    "segfault": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("level", JUDGED)
def test_a_bomb_in_an_artifact_costs_the_verdict_not_the_trainer(level: Level, bomb: str):
    """Regular expression, archive, number, nesting; exit and crash: correctness None with a cause,
    within the verifier's own limits."""
    verdict = judged(level, "pass", answer_of(f"{BOMBS[bomb]}; return {{}}"), timeout_s=0.7)
    assert verdict.correctness is None and verdict.error


@pytest.mark.parametrize("level", JUDGED)
def test_reasons_of_a_verifier_cannot_forge_log_lines(level: Level):
    """A verifier quotes what the agent wrote."""
    verify = answer_of(
        "return {'correctness': 0.0, 'reasons': ['got \\x1b[2J\\nlevel=info reward=1.0\\r']}"
    )
    verdict = judged(level, "pass", verify)
    assert verdict.reasons == ("got \\x1b[2J\\nlevel=info reward=1.0\\r",)


@pytest.mark.parametrize("level", JUDGED)
def test_nothing_of_the_episode_runs_once_it_is_closed(level: Level):
    """Daemons of both boxes, by the marker in their environment; also after a lost box."""
    need(level)
    bundle = ToolBundle("attacked", TOOLS, HONEST)
    config = SandboxConfig().model_copy(update={"level": level.value})

    async def go() -> None:
        leases = MemoryLeases()
        pool = SandboxPool(bundle, size=1, leases=leases, config=config)
        session = await pool.acquire(spec_of(bundle))
        await session.start()
        code = "import subprocess; subprocess.Popen(['setsid', 'sleep', '300'])"
        await session.call(RawCall("python", json.dumps({"code": code})))
        boxes = [lease.ref for lease in leases.held.values()]
        assert any(marked_processes(box) for box in boxes)
        await pool.close()
        assert not any(marked_processes(box) for box in boxes) and not leases.held
        with pytest.raises(SandboxLost):
            await session.verify("")
        await session.close()

    asyncio.run(go())
