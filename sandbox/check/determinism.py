"""The same artifacts, another process: does the verifier say the same?

verify.py runs again as a process of its own inside the verifier's box, with another hash seed,
clock, time zone and cpu count, many times each: over the solution's result, over nothing, and over
results that are half right, where an order or a sample decides.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.scripts import Script
from sandbox.task import TaskSpec, ToolBundle

VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "as is", "hash": "0", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 1", "hash": "1", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 4242", "hash": "4242", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 77", "hash": "77", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 15", "hash": "15", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 303", "hash": "303", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "hash seed 9001", "hash": "9001", "shift_s": 0, "cpus": 0, "tz": "UTC"},
    {"name": "clock + 7 h", "hash": "0", "shift_s": 7 * 3600, "cpus": 0, "tz": "UTC"},
    {"name": "clock + 400 days", "hash": "0", "shift_s": 400 * 86400, "cpus": 0, "tz": "UTC"},
    {"name": "clock - 3 years", "hash": "0", "shift_s": -1095 * 86400, "cpus": 0, "tz": "UTC"},
    {"name": "time zone +14", "hash": "0", "shift_s": 0, "cpus": 0, "tz": "LINT-14"},
    {"name": "1 cpu", "hash": "0", "shift_s": 0, "cpus": 1, "tz": "UTC"},
    {"name": "64 cpus", "hash": "0", "shift_s": 0, "cpus": 64, "tz": "UTC"},
)
REPEATS = 25
"""Verdicts in the unchanged surroundings; a verdict by luck shows here."""
FEW = 2
"""Verdicts in each of the others."""
BUDGET_S = 8.0

_CHILD = """
import datetime, json, multiprocessing, os, socket, sys, time, types

job = json.load(sys.stdin)
shift, cpus = job["shift_s"], job["cpus"]
if shift:
    real_time, real_ns = time.time, time.time_ns
    real_local, real_gm, real_strftime = time.localtime, time.gmtime, time.strftime
    time.time = lambda: real_time() + shift
    time.time_ns = lambda: real_ns() + shift * 10**9
    time.localtime = lambda s=None: real_local(time.time() if s is None else s)
    time.gmtime = lambda s=None: real_gm(time.time() if s is None else s)
    time.strftime = lambda f, t=None: real_strftime(f, time.localtime() if t is None else t)
    delta = datetime.timedelta(seconds=shift)

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + delta

        @classmethod
        def utcnow(cls):
            return super().now(datetime.timezone.utc).replace(tzinfo=None) + delta

        @classmethod
        def today(cls):
            return super().today() + delta

    class ShiftedDate(datetime.date):
        @classmethod
        def today(cls):
            return super().today() + delta

    datetime.datetime, datetime.date = Shifted, ShiftedDate
if cpus:
    os.cpu_count = lambda: cpus
    multiprocessing.cpu_count = lambda: cpus
    os.sched_getaffinity = lambda pid: set(range(cpus))
used = []
real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo


def connect(self, address):
    if self.family != socket.AF_UNIX:
        used.append(str(address))
    return real_connect(self, address)


def lookup(host, *rest, **more):
    used.append(str(host))
    return real_lookup(host, *rest, **more)


socket.socket.connect, socket.getaddrinfo = connect, lookup
package, toolkit = types.ModuleType("sandbox"), types.ModuleType("sandbox.toolkit")
package.__path__ = []
sys.modules["sandbox"], sys.modules["sandbox.toolkit"] = package, toolkit
module = {"__name__": "verify"}
answers, end = [], time.monotonic() + job["budget_s"]
for _ in range(job["repeats"]):
    try:
        if not answers:
            exec(compile(job["source"], "<verify.py>", "exec"), module)
        text = json.dumps(job["state"])
        answer = module["verify"](
            final_text=job["final_text"], end_state=json.loads(text), data=json.loads(job["data"])
        )
        answer = {key: answer[key] for key in ("correctness", "error") if key in answer}
    except Exception as error:
        answer = {"crash": type(error).__name__}
    answers.append(json.dumps(answer, sort_keys=True))
    if time.monotonic() > end:
        break
sys.stdout.write("\\n" + json.dumps({"answers": sorted(set(answers)), "runs": len(answers),
                                    "network": used[:5]}))
"""

_HARNESS = """
import json, os, subprocess, sys

SOURCE = {source!r}
CHILD = {child!r}
VARIANTS = {variants!r}


def verify(final_text, end_state, data):
    results = []
    for variant in VARIANTS:
        job = {{**variant, "source": SOURCE, "state": end_state, "data": json.dumps(data),
               "final_text": final_text, "budget_s": {budget_s},
               "repeats": {few} if results else {repeats}}}
        environment = {{"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": variant["hash"],
                       "TZ": variant["tz"], "LANG": "C.UTF-8",
                       "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
                       "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}}
        done = subprocess.run([sys.executable, "-s", "-S", "-B", "-P" if sys.version_info >= (3, 11)
                               else "-B", "-c", CHILD], input=json.dumps(job), text=True,
                              capture_output=True, env=environment, timeout=60)
        try:
            results.append({{"name": variant["name"], **json.loads(done.stdout.splitlines()[-1])}})
        except (ValueError, IndexError):
            results.append({{"name": variant["name"], "answers": ["process ended: "
                             + done.stderr[-200:]], "runs": 0, "network": []}})
    return {{"correctness": 0.0, "reasons": [], "parl_variants": results}}
"""


def variant_bundle(bundle: ToolBundle, repeats: int = REPEATS) -> ToolBundle:
    """The task's tools with a verifier that runs verify.py in every variant."""
    source = _HARNESS.format(
        source=bundle.verify_source,
        child=_CHILD,
        variants=list(VARIANTS),
        repeats=repeats,
        few=FEW,
        budget_s=BUDGET_S / len(VARIANTS),
    )
    return replace(bundle, verify_source=source)


def variant_spec(spec: TaskSpec, bundle: ToolBundle) -> TaskSpec:
    """``spec`` for a variant bundle: time for every variant."""
    timeout_s = max(120.0, spec.verifier.timeout_s)
    return replace(spec, bundle=bundle.hash, verifier=replace(spec.verifier, timeout_s=timeout_s))


async def run_determinism(
    stage: Stage, spec: TaskSpec, scripts: list[Script], half: list[Script]
) -> Step:
    """The end states and answers of ``scripts``, each judged in every variant; ``half``: results
    that are partly right, which may have no verdict where they break the world."""
    step = Step("determinism")
    runs = 0
    for script in [*scripts, *half]:
        played = await stage.play(spec, script)
        results = played.verdict.details.get("parl_variants")
        if results is None and script in half:
            continue  # a broken world has no end state to judge; the step "tamper" played it too
        if results is None:
            step.add(
                "verifier-error",
                f"determinism: {script.name}",
                f"the end state could not be judged: {played.verdict.error}",
            )
            continue
        runs += sum(result["runs"] for result in results)
        if script is scripts[0]:
            step.data["texts"] = [seen.text for seen in played.observations]
        _compare(script.name, results, step)
    step.note = f"{runs} verdicts in {len(VARIANTS)} surroundings"
    return step


def _compare(agent: str, results: list[dict[str, Any]], step: Step) -> None:
    base = results[0]
    for result in results:
        shown = ", ".join(str(answer) for answer in result["answers"])[:300]
        if len(result["answers"]) > 1:
            step.add(
                "nondeterministic-verifier",
                f"determinism: {agent}, {result['name']}",
                f"the same artifacts gave {len(result['answers'])} verdicts: {shown}",
            )
        elif len(base["answers"]) == 1 and result["answers"] != base["answers"]:
            step.add(
                "nondeterministic-verifier",
                f"determinism: {agent}, {result['name']}",
                f"the verdict is {shown}, and {base['answers'][0]} without the change",
            )
        if result["network"]:
            step.add(
                "verifier-network",
                f"determinism: {agent}",
                f"the verifier asked the network for {json.dumps(result['network'])[:200]}",
            )
