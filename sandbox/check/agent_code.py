"""Does the verifier run files that the agent can change? They are replaced by a program that tells.

The program writes a reward that no verifier gives and ends the process group of test.sh: where that
reward is the verdict, the agent's code ran and could have given itself any other.
"""

from __future__ import annotations

import json
from dataclasses import replace

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.probe import probe_script
from sandbox.check.scripts import Script
from sandbox.check.written import Written, overwriting
from sandbox.task import TaskSpec

MARK = 0.4242
MAX_PROGRAMS = 3
_SUFFIXES = (".py", ".sh", ".bash", ".pl", ".rb", ".js", ".mjs", ".mk", ".awk", ".env")
_POISON = """
import json, os
PYTHON = '''import os, signal
for root in (os.environ.get("HOME", "/"), "/"):
    folder = os.path.join(root, "logs", "verifier")
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in (("reward.json", '{{"reward": {mark}}}'), ("reward.txt", "{mark}")):
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
    except OSError:
        pass
os.killpg(0, signal.SIGKILL)
'''
SHELL = '''for root in "$HOME" ""; do
mkdir -p "$root/logs/verifier" 2>/dev/null || continue
echo '{{"reward": {mark}}}' > "$root/logs/verifier/reward.json"
echo {mark} > "$root/logs/verifier/reward.txt"
done
kill -9 0
'''
done = []
for name in {names!r}:
    try:
        with open(name, "rb") as file:
            head = file.read(200)
        runs = name.endswith({suffixes!r}) or head.startswith(b"#!") or os.access(name, os.X_OK)
        if not runs or os.path.islink(name):
            continue
        python = name.endswith(".py") or b"python" in head.split(b"\\n")[0]
        with open(name, "w") as file:
            file.write(PYTHON if python else "#!/bin/sh\\n" + SHELL)
        done.append(name)
    except OSError:
        pass
print(json.dumps(done))
"""


async def try_agent_code(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Episodes played. Files that the solution leaves alone: an error, unless it repairs code and
    the tests must run what is beside it; files that it writes: a warning, as tests may run them.
    """
    hidden = (".", "tests/", "solution/", "logs/")
    inputs = [name for name in written.inputs if not name.startswith(hidden)]
    made = [name for name in written.artifacts if not name.startswith(hidden)]
    repairs = [name for name in made if name not in written.created and name.endswith(_SUFFIXES)]
    count = await _does_nothing(stage, spec, oracle, written, made, step)
    for names, deliverable in ((inputs, bool(repairs)), (made, True)):
        ran, poisoned = await _ran(stage, spec, oracle, names)
        count += bool(names)
        if not ran:
            continue
        culprits = []
        for name in poisoned[:8] if len(poisoned) > 1 else []:
            if (await _ran(stage, spec, oracle, [name]))[0]:
                culprits.append(name)
            count += 1
        shown = ", ".join(culprits or poisoned)[:160]
        step.add(
            "verifier-executes-agent-text",
            f"tamper: {shown}",
            "the verifier runs this file, which the agent can change, and it could write the "
            "reward; keep what judges in tests/"
            + (", and run the agent's program where it cannot write /logs" if deliverable else ""),
            "warning" if deliverable else "error",
        )
    return count


async def _does_nothing(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, made: list[str], step: Step
) -> int:
    """Programs that the solution wrote, each replaced by one that does nothing and ends well."""
    programs = [name for name in made if name.endswith(_SUFFIXES)
                or written.artifacts[name].startswith(b"#!")][:MAX_PROGRAMS]  # fmt: skip
    for name in programs:
        text = "pass\n" if name.endswith(".py") else "exit 0\n"
        played = await stage.play(spec, overwriting("oracle-does-nothing", oracle, [name], text))
        # not looked at, where any text at all passes: what it made is judged
        other = await stage.play(spec, overwriting("oracle-nonsense", oracle, [name], "parl: )("))
        if played.passed and not other.passed:
            step.add(
                "empty-passes",
                f"tamper: {name} that does nothing",
                f"scored {played.verdict.correctness:g}, which passes: that a program ends without "
                "an error says nothing; compare what it prints or makes",
            )
    return 2 * len(programs)


async def _ran(
    stage: Stage, spec: TaskSpec, oracle: Script, names: list[str]
) -> tuple[bool, list[str]]:
    """Whether one of the files ran, and which were replaced."""
    if not names:
        return False, []
    code = _POISON.format(names=names, mark=MARK, suffixes=_SUFFIXES)
    probe = probe_script("agent-code", code)
    script = replace(oracle, name="oracle-agent-code", rounds=(*oracle.rounds, *probe.rounds))
    played = await stage.play(spec, script)
    try:
        poisoned = json.loads(played.observations[-1].text)
    except (ValueError, IndexError):  # the box did not answer: nothing was replaced
        return False, []
    scored = played.verdict.correctness
    return scored is not None and abs(scored - MARK) < 1e-9, poisoned
