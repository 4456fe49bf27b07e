"""Code inside the agent's box, as an agent with a shell could run it: for tampering and for leaks.

The task's tools.py gets one more tool, ``parl_probe(code)``, which runs Python as a child process
in the working directory; nothing of the task's own process is touched. verify.py is wrapped so
that the check sees the end state beside the verdict.
"""

from __future__ import annotations

import json
from dataclasses import replace

from sandbox.check.scripts import Script
from sandbox.session import RawCall
from sandbox.task import TaskSpec, ToolBundle
from sandbox.tool_spec import ToolSpec

PROBE_TOOL = "parl_probe"
MAX_OUTPUT_BYTES = 1 << 20
STATE_KEY = "parl_end_state"
MAX_STATE_CHARS = 200_000

_PROBE_SOURCE = '''

import subprocess as _parl_subprocess
import sys as _parl_sys
import tempfile as _parl_tempfile

from sandbox.toolkit import tool as _parl_mark, workdir as _parl_workdir


def parl_probe(code: str) -> str:
    """Run Python code beside the tools."""
    with _parl_tempfile.TemporaryFile(dir=_parl_workdir()) as output:
        _parl_subprocess.run(
            [_parl_sys.executable, "-I", "-c", code],
            cwd=_parl_workdir(),
            stdin=_parl_subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=20,
            check=False,
        )
        output.seek(0)
        return output.read().decode("utf-8", "replace")


parl_probe = _parl_mark(parl_probe)
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
    """``spec`` for a probe bundle: one more tool, room for its answers and for slow runs of it."""
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }
    probe = ToolSpec(PROBE_TOOL, "check", schema, effect="write")
    limits = replace(
        spec.limits,
        max_output_bytes=MAX_OUTPUT_BYTES,
        call_timeout_s=max(25.0, spec.limits.call_timeout_s),
    )
    return replace(spec, tools=(*spec.tools, probe), bundle=bundle.hash, limits=limits)


def probe_script(name: str, code: str, final_text: str = "") -> Script:
    """One probe, then an answer."""
    call = RawCall(PROBE_TOOL, json.dumps({"code": code}))
    return Script(name, ((call,),), final_text)
