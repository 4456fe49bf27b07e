"""Code inside the agent's box, as an agent with a shell could run it: for tampering and for leaks.

The task's tools.py gets three more tools. ``parl_probe(code)`` runs Python as a child process in
the working directory; nothing of the task's own process is touched. ``parl_sweep(calls, repeat,
budget_s)`` calls the task's own tools, ``parl_escape(jobs, budget_s)`` too, with paths that lead
out. verify.py is wrapped so that the check sees the end state beside the verdict.
"""

from __future__ import annotations

import json
from dataclasses import replace

from sandbox.check.scripts import Script
from sandbox.session import RawCall
from sandbox.task import TaskSpec, ToolBundle
from sandbox.tool_spec import ToolSpec

PROBE_TOOL = "parl_probe"
SWEEP_TOOL = "parl_sweep"
ESCAPE_TOOL = "parl_escape"
MAX_OUTPUT_BYTES = 1 << 20
STATE_KEY = "parl_end_state"
MAX_STATE_CHARS = 200_000

_PROBE_SOURCE = '''

import json as _parl_json
import os as _parl_os
import re as _parl_re
import subprocess as _parl_subprocess
import sys as _parl_sys
import tempfile as _parl_tempfile
import time as _parl_time

from sandbox.toolkit import ToolError as _parl_refusal, tool as _parl_mark, workdir as _parl_workdir


def parl_probe(code: str) -> str:
    """Run Python code beside the tools."""
    with _parl_tempfile.TemporaryFile(dir=_parl_workdir()) as output:
        _parl_subprocess.run(
            [_parl_sys.executable, "-I", "-c", code],
            stdin=_parl_subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=20,
            check=False,
        )
        output.seek(0)
        return output.read().decode("utf-8", "replace")


_PARL_NO_STATE = "end_state: "


def _parl_state() -> str:
    """The end state as text; a world that cannot tell it has that for a state."""
    try:
        state = globals()["end_state"]() if "end_state" in globals() else {}
        return _parl_json.dumps(state, sort_keys=True, default=str)
    except Exception as error:
        return f"{_PARL_NO_STATE}{type(error).__name__}: {error}"


def _parl_outcome(name: str, arguments: dict) -> list:
    try:
        kind, text = "value", str(globals()[name](**arguments))
    except _parl_refusal as error:
        kind, text = "refused", str(error)
    except Exception as error:
        kind, text = "crash", f"{type(error).__name__}: {error}"
    # how long a call took is no part of its answer
    text = _parl_re.sub(r"\\d+(\\.\\d+)? ?(ms|s|sec|seconds)\\b", "[time]", text)
    return [kind, text if len(text) < 400 else text[:300] + f"... {len(text)} {hash(text)}"]


def parl_sweep(calls: str, repeat: int, budget_s: float) -> str:
    """Call tools in this process; what each answered, and whether the end state changed."""
    seen, before = [], _parl_state()
    end = _parl_time.monotonic() + budget_s
    jobs = _parl_json.loads(calls)
    for number, (name, arguments) in enumerate(jobs, start=1):
        begin = _parl_time.monotonic()
        if begin > end:
            break
        share = begin + (end - begin) / (len(jobs) - number + 1)
        outcomes, runs = [], 0
        while runs < repeat and len(outcomes) < 2:
            outcome = _parl_outcome(name, arguments)
            runs += 1
            if outcome not in outcomes:
                outcomes.append(outcome)
            if _parl_time.monotonic() > share:
                break
        after = _parl_state()
        seen.append({"tool": name, "arguments": arguments, "outcomes": outcomes, "runs": runs,
                     "changed": after != before,
                     "lost": after[:200] if after.startswith(_PARL_NO_STATE) else None})
        before = after
    return _parl_json.dumps(seen)


def _parl_places(mark: str) -> list:
    """Where files of that name lie, in the working folder and beside it."""
    base = _parl_workdir()
    found = []
    for folder, _, names in _parl_os.walk(base):
        found += [_parl_os.path.join(folder, name) for name in names if name.startswith(mark)]
    for folder in (str(base.parent), "/tmp"):
        try:
            found += [_parl_os.path.join(folder, name) for name in _parl_os.listdir(folder)
                      if name.startswith(mark) and _parl_os.path.join(folder, name) not in found]
        except OSError:  # what cannot be listed cannot be written
            pass
    return found


def parl_escape(jobs: str, budget_s: float) -> str:
    """Call tools with paths and commands in place of a name; what was made or read where."""
    base = _parl_workdir()
    for ending in ("", ".txt", ".json", ".md"):
        (base / f"parl-secret{ending}").write_text("parl-secret-0815")
    seen, end, count = [], _parl_time.monotonic() + budget_s, 0
    for name, arguments, key, forms in _parl_json.loads(jobs):
        entry = {"tool": name, "key": key, "plain": [], "escapes": [], "reads": []}
        seen.append(entry)
        for form in forms:
            if _parl_time.monotonic() > end:
                break
            count += 1
            mark = f"parl-mark-{count}-"
            value = form.replace("{mark}", mark).replace("{here}", str(base))
            kind, text = _parl_outcome(name, {**arguments, key: value})
            made = [_parl_os.path.realpath(path) for path in _parl_places(mark)]
            if form == "{mark}":
                entry["plain"] = [_parl_os.path.dirname(path) for path in made]
                entry["home"] = str(base)
            entry["escapes"] += [[form, path] for path in made if form != "{mark}"]
            if kind == "value" and ("parl-secret-0815" in text or "SigQ:" in text):
                entry["reads"].append(form)
    return _parl_json.dumps(seen)


parl_probe, parl_sweep = _parl_mark(parl_probe), _parl_mark(parl_sweep)
parl_escape = _parl_mark(parl_escape)
'''

_WRAPPER = """
import json as _parl_json

_PARL_SOURCE = {source!r}
_parl_module = {{"__name__": "verify"}}
exec(compile(_PARL_SOURCE, "<verify.py>", "exec"), _parl_module)


def verify(final_text, end_state, data):
    answer = _parl_module["verify"](final_text=final_text, end_state=end_state, data=data)
    if isinstance(answer, dict):
        answer = dict(answer)
        answer["{key}"] = _parl_json.dumps(end_state, default=str)[:{limit}]
    return answer
"""


def probe_bundle(bundle: ToolBundle) -> ToolBundle:
    """The task's code with the probe in it; never the code that is certified."""
    return replace(
        bundle,
        tools_source=bundle.tools_source + _PROBE_SOURCE,
        verify_source=_WRAPPER.format(
            source=bundle.verify_source, key=STATE_KEY, limit=MAX_STATE_CHARS
        ),
    )


def probe_spec(spec: TaskSpec, bundle: ToolBundle) -> TaskSpec:
    """``spec`` for a probe bundle: three more tools, room for their answers and for slow runs."""
    schemas = {
        PROBE_TOOL: {"code": {"type": "string"}},
        SWEEP_TOOL: {
            "calls": {"type": "string"},
            "repeat": {"type": "integer"},
            "budget_s": {"type": "number"},
        },
        ESCAPE_TOOL: {"jobs": {"type": "string"}, "budget_s": {"type": "number"}},
    }
    probes = [
        ToolSpec(
            name,
            "check",
            {"type": "object", "properties": properties, "required": list(properties)},
            effect="write",
        )
        for name, properties in schemas.items()
    ]
    limits = replace(
        spec.limits,
        max_output_bytes=MAX_OUTPUT_BYTES,
        call_timeout_s=max(60.0, spec.limits.call_timeout_s),
    )
    return replace(spec, tools=(*spec.tools, *probes), bundle=bundle.hash, limits=limits)


def probe_script(name: str, code: str, final_text: str = "") -> Script:
    """One probe, then an answer."""
    call = RawCall(PROBE_TOOL, json.dumps({"code": code}))
    return Script(name, ((call,),), final_text)
