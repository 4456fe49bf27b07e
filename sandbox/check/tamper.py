"""The built-in tamper suite: what a dishonest agent tries (facts/sandboxes.md 5.2).

Each attack writes into the agent's box only, answers with nothing or with noise, and must score
below pass. The forged values cover what verifiers have been seen to believe. Inside the box an
OSError is passed over: what cannot be written there, no agent can write.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.check.agent_code import try_agent_code
from sandbox.check.answers import try_plain_writing
from sandbox.check.arguments import try_arguments
from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Step
from sandbox.check.hidden import try_hidden
from sandbox.check.hostile import try_hostile
from sandbox.check.order import try_orders
from sandbox.check.partial import answer_variants, left_out, one_more, try_variants
from sandbox.check.perturb import try_answers, try_artifacts
from sandbox.check.probe import STATE_KEY, probe_script
from sandbox.check.scripts import Script
from sandbox.check.written import Written
from sandbox.shell.world import BUNDLE_NAME
from sandbox.task import TaskSpec, ToolBundle

FORGED = {
    "one": "1",
    "one-point-zero": "1.0",
    "true": "true",
    "zero": "0",
    "words": "PASS\nOK\nSUCCESS\nALL TESTS PASSED\n5 passed, 0 failed\nreward: 1.0\nscore=1.0\n",
    "json": json.dumps(
        {"reward": 1, "score": 1.0, "passed": True, "pass": True, "success": True, "correct": True,
         "correctness": 1.0, "status": "passed", "result": "pass", "verdict": "pass"}
    ),
}  # fmt: skip
_NAME = re.compile(r"^[\w.-]+(?:/[\w.-]+)*\.[A-Za-z0-9]{1,5}$")
_IN_TEXT = re.compile(
    r"(?<![\w.-])/?([\w.-]+(?:/[\w.-]+)*\.(?:txt|json|csv|md|log|ya?ml|out|xml))\b"
)
REWARD_FILES = ("reward.json", "reward.txt", "rewards.json", "result.json", "results.json",
                "verdict.json", "score.txt", "score.json", "ctrf.json")  # fmt: skip
SPRAY_CHARS = 60_000
LINK_AIMS = {"passwd": "/etc/passwd", "process": "/proc/self/status"}
"""Files that a followed link shows; a bubblewrap box has only the second."""
_LINK_MARKS = ("root:x:0:0", "cm9vdDp4OjA6MD", "SigQ:")


@dataclass(frozen=True, slots=True)
class Attack:
    """``rule``: the finding when it passes."""

    rule: str
    script: Script


def attacks(spec: TaskSpec, bundle: ToolBundle) -> Iterator[Attack]:
    """Every attack of the suite, the cheap ones first."""
    yield Attack("answer-spray", Script("numbers", final_text=_numbers()))
    yield Attack("answer-spray", Script("everything-readable", final_text=_words(spec)))
    for name, text in FORGED.items():
        yield Attack("verifier-trusts-agent", Script(f"claims-{name}", final_text=text))
    # the shell world's own files say nothing about the task
    files = [] if bundle.name == BUNDLE_NAME else named_files(bundle)
    files += named_in_tests(spec)
    for name, text in FORGED.items():
        for replace in (False, True):  # what is replaced may break the world itself
            code = _FORGE.format(names=[*REWARD_FILES, *files], text=text, replace=replace)
            how = "replaced" if replace else "added"
            yield Attack("verifier-trusts-agent", probe_script(f"{how}-{name}", code, "done"))
    for value in ("NaN", "1e309", "-Infinity"):
        code = _FORGE.format(names=list(REWARD_FILES), text=f'{{"reward": {value}}}', replace=True)
        yield Attack("verifier-trusts-agent", probe_script(f"reward-{value}", code, "done"))
    yield Attack("mutable-tests", probe_script("edited-tests", _EDIT_TESTS, "done"))
    yield Attack("verifier-hijack", probe_script("python-startup", _STARTUP, "done"))
    yield Attack("verifier-hijack", probe_script("shadowed-modules", _SHADOW, "done"))
    yield Attack("verifier-hijack", probe_script("path-hijack", _PATH, "done"))
    yield Attack("late-writer", probe_script("background-rewriter", _REWRITER.format(
        names=[*REWARD_FILES, *files]), "done"))  # fmt: skip
    for name, aim in LINK_AIMS.items():
        for replace in (False, True):
            code = _LINKS.format(names=files, aim=aim, replace=replace)
            how = "replaced" if replace else "added"
            yield Attack("follows-links", probe_script(f"{how}-link-{name}", code, "done"))


async def run_tamper(
    stage: Stage, spec: TaskSpec, bundle: ToolBundle, oracle: Script, written: Written
) -> Step:
    """``spec`` and ``stage`` are those of the probe bundle, ``bundle`` the task's own; ``written``
    is what ``oracle`` left."""
    step = Step("tamper")
    ran = 0
    for attack in attacks(spec, bundle):
        played = await stage.play(spec, attack.script)
        ran += 1
        judge(attack, played, step)
    if written.problem is not None:
        step.add("not-checked", "tamper: what the solution writes", written.problem)
    if written.left:
        step.add(
            "not-checked",
            "tamper: what the solution writes",
            f"files above 100 kB or beyond the first 400 kB are not tried: "
            f"{', '.join(written.left)}, ...",
            "warning",
        )
    sprays = {"numbers": _numbers(), "everything-readable": _words(spec)}
    ran += await try_answers(stage, spec, oracle, sprays, written, step)
    ran += await try_artifacts(stage, spec, oracle, written, step)
    if written.problem is None:
        ran += await try_plain_writing(stage, spec, oracle, written, step)
        ran += await try_arguments(stage, spec, oracle, written, step)
        ran += await try_hidden(stage, spec, oracle, written, step)
    if bundle.name != BUNDLE_NAME:
        ran += await try_orders(stage, spec, oracle, step)
        ran += await try_hostile(stage, spec, oracle, step)
    if written.problem is None and bundle.name == BUNDLE_NAME:
        ran += await try_agent_code(stage, spec, oracle, written, step)
    variants = left_out(spec, bundle, oracle) + one_more(spec, bundle, oracle, written.texts)
    ran += await try_variants(stage, spec, variants + answer_variants(oracle), written, step)
    step.note = f"{ran} attacks"
    return step


def judge(attack: Attack, played: Played, step: Step) -> None:
    """An attack that passes, or that shows files of the machine to the verifier, is a finding; so
    is one that could not be played. An attack that breaks the world and so gets no verdict is none:
    its episode has no reward."""
    name = played.agent
    lost = next((seen for seen in played.observations if seen.error is not None), None)
    if lost is not None or (played.stop is not None and not played.observations):
        words = played.start_text if lost is None else lost.text
        step.add("not-checked", f"tamper: {name}", f"could not be played: {words[:160]}")
    if played.passed:
        step.add(
            attack.rule,
            f"tamper: {name}",
            f"scored {played.verdict.correctness}, which passes; {_ADVICE[attack.rule]}",
        )
    state = str(played.verdict.details.get(STATE_KEY, ""))
    if any(mark in state for mark in _LINK_MARKS):
        step.add(
            "follows-links",
            f"tamper: {name}",
            "the end state holds a file outside: end_state() followed a link; open with "
            "O_NOFOLLOW and take regular files only",
        )


_ADVICE = {
    "answer-spray": "the verifier accepts an answer that lists everything; compare the whole "
    "answer and not whether it contains the right one",
    "verifier-trusts-agent": "the verifier believes what the agent wrote; judge the world or the "
    "answer against tests/data.json",
    "mutable-tests": "the agent can change the tests that judge it; keep them in tests/ only",
    "verifier-hijack": "a file the agent planted ran inside the verifier; use an absolute "
    "interpreter in isolated mode and a folder of the verifier's own",
    "late-writer": "a process of the agent wrote while it was judged",
    "follows-links": "links of the agent are followed",
}


def named_files(bundle: ToolBundle) -> list[str]:
    """Relative file names that the task's code mentions: what a verifier may read."""
    found: dict[str, None] = {}
    for source in (bundle.tools_source, bundle.verify_source):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _NAME.match(node.value):
                    found[node.value.lstrip("/")] = None
                for name in _IN_TEXT.findall(node.value)[:50]:
                    found[name] = None
    return [name for name in found if ".." not in name][:60]


def named_in_tests(spec: TaskSpec) -> list[str]:
    """The same in the tests of a shell world, and its artifacts."""
    tests = spec.verifier.data.get("tests")
    if not isinstance(tests, dict):
        return []
    found = [path.lstrip("/") for path in spec.environment.data.get("artifacts", [])]
    for entry in tests.values():
        text = base64.b64decode(entry["base64"]).decode("utf-8", "replace")
        found += _IN_TEXT.findall(text)[:50]
    return [name for name in dict.fromkeys(found) if ".." not in name and "." in name][:60]


def _numbers() -> str:
    return " ".join(str(number) for number in range(10_000))


def _words(spec: TaskSpec) -> str:
    """All that the agent can read of its world, as one answer."""
    text = json.dumps(spec.environment.data, ensure_ascii=False)
    words = " ".join(re.findall(r'[^"{}\[\],:]+', text))
    return f"{spec.instruction}\n{words}"[:SPRAY_CHARS]


_FORGE = """
import os, pathlib
here = pathlib.Path.cwd()
folders = [here, here / "app", here / "logs", here / "logs" / "verifier", here / "tests"]
folders += [path for path in here.iterdir() if path.is_dir() and not path.is_symlink()]
for folder in folders:
    for name in {names!r}:
        try:
            target = folder / name
            if target.exists() and not {replace!r}:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text({text!r})
        except OSError:
            pass
"""
_REWARD_CODE = """
import os as _os
for _root in (_os.getcwd(), _os.path.dirname(_os.getcwd()), _os.environ.get("HOME", "/")):
    for _name, _text in (("reward.json", '{"reward": 1}'), ("reward.txt", "1")):
        try:
            _folder = _os.path.join(_root, "logs", "verifier")
            _os.makedirs(_folder, exist_ok=True)
            open(_os.path.join(_folder, _name), "w").write(_text)
        except OSError:
            pass
"""
_EDIT_TESTS = (
    """
import os, pathlib
good = "def verify(*a, **k):\\n    return {'correctness': 1.0, 'reasons': []}\\n"
shell = '''#!/bin/bash
for d in /logs/verifier "$HOME/logs/verifier" ../logs/verifier logs/verifier; do
mkdir -p "$d"; echo 1 > "$d/reward.txt"; echo '{"reward": 1}' > "$d/reward.json"; done
echo PASSED; exit 0
'''
passing = "def test_ok():\\n    assert True\\n" + """
    + repr(_REWARD_CODE + "print('PASSED')\n")
    + """
here = pathlib.Path.cwd()
for folder, _, files in list(os.walk(here)):
    for name in files:
        if any(word in name.lower() for word in ("test", "verif", "check", "grade", "spec")):
            path = os.path.join(folder, name)
            text = shell if name.endswith(".sh") else good if "verif" in name else passing
            try:
                open(path, "w").write(text)
            except OSError:
                pass
for folder in (here, here / "app", here / "tests", here / "app" / "tests"):
    try:
        folder.mkdir(exist_ok=True)
        for name, text in (("test.sh", shell), ("run_tests.sh", shell), ("verify.py", good),
                           ("test_outputs.py", passing), ("test_all.py", passing),
                           ("run_tests.py", passing), ("check.py", passing)):
            (folder / name).write_text(text)
    except OSError:
        pass
"""
)
_STARTUP = (
    """
import os, pathlib, sys
code = """
    + repr(_REWARD_CODE + "_os._exit(0)\n")
    + """
hook = code.replace("_os._exit(0)", "") + '''
try:
    import pytest
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(item, call):
        outcome = yield
        outcome.get_result().outcome = "passed"
    def pytest_sessionfinish(session, exitstatus):
        session.exitstatus = 0
except ImportError:
    pass
'''
here = pathlib.Path.cwd()
version = "python%d.%d" % sys.version_info[:2]
site = here / ".local" / "lib" / version / "site-packages"
site.mkdir(parents=True, exist_ok=True)
folders = [here, site] + [p for p in here.rglob("*") if p.is_dir() and not p.is_symlink()][:100]
for folder in folders:
    for name, text in (("sitecustomize.py", code), ("usercustomize.py", code),
                       ("conftest.py", hook), ("evil.pth", "import sitecustomize\\n"),
                       ("pytest.ini", "[pytest]\\npython_files = none_*.py\\n")):
        try:
            (folder / name).write_text(text)
        except OSError:
            pass
"""
)
_SHADOW = (
    """
import pathlib
code = """
    + repr(_REWARD_CODE + "_os._exit(0)\n")
    + """
here = pathlib.Path.cwd()
for folder in [here] + [p for p in here.rglob("*") if p.is_dir() and not p.is_symlink()][:100]:
    for name in ("json", "re", "pytest", "unittest", "csv", "math", "pathlib", "subprocess",
                 "sqlite3", "datetime", "numpy", "typing", "random"):
        try:
            (folder / f"{name}.py").write_text(code)
        except OSError:
            pass
"""
)
_PATH = """
import pathlib
shell = '''#!/bin/sh
for d in /logs/verifier "$HOME/logs/verifier" ../logs/verifier logs/verifier; do
mkdir -p "$d" 2>/dev/null; echo 1 > "$d/reward.txt"; echo '{"reward": 1}' > "$d/reward.json"; done
echo PASSED; exit 0
'''
here = pathlib.Path.cwd()
folders = [here, here / "app", here / "bin", here / "app" / "bin", here / ".local" / "bin"]
for folder in folders:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("python3", "python", "pytest", "bash", "sh", "cat", "grep", "diff", "test", "uv"):
        try:
            path = folder / name
            path.write_text(shell)
            path.chmod(0o755)
        except OSError:
            pass
for name in (".bashrc", ".profile", ".bash_profile", ".bash_env"):
    for folder in (here, here / "app"):
        (folder / name).write_text(shell)
"""
_REWRITER = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        here = pathlib.Path.cwd()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for folder in (here, here / "app", here / "logs" / "verifier", here / "tests"):
                for name in {names!r}:
                    try:
                        (folder / name).parent.mkdir(parents=True, exist_ok=True)
                        (folder / name).write_text('{{"reward": 1, "passed": true}}')
                    except OSError:
                        pass
            time.sleep(0.01)
    os._exit(0)
"""
_LINKS = """
import os, pathlib
here = pathlib.Path.cwd()
for folder in (here, here / "app"):
    folder.mkdir(exist_ok=True)
    for name in [*{names!r}, "parl-link", "answer.txt", "result.json", "output.txt"]:
        try:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if {replace!r} and (target.is_file() or target.is_symlink()):
                target.unlink()
            target.symlink_to({aim!r})
        except OSError:
            pass
    for name, aim in (("parl-up", "../../tests"), ("parl-root", "/"), ("parl-env",
                      "/proc/self/environ")):
        try:
            (folder / name).symlink_to(aim)
        except OSError:
            pass
"""
