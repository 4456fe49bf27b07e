"""The solution on other days and at other hours: a task must be solvable whenever it is drawn.

The tools run with a clock that is ahead or behind, and so do Python programs they start (a service
in the box). Not reached: clocks of other programs (``date``) and of C libraries. The shell world,
whose tools are not the author's, has its own way (sandbox.check.shell_clock).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Step
from sandbox.check.scripts import Script
from sandbox.task import TaskSpec, ToolBundle

SHIFT_KEY = "parl_clock_shift_s"
_HOURS = (29, 58, 87, 116, 121, 151)
"""With now: all seven days of the week, at hours spread over the day."""
_DAYS = (31, 92, 183, 400, -1095)
SHIFTS = (*(timedelta(hours=hours) for hours in _HOURS), *(timedelta(days=days) for days in _DAYS))

CLOCK_SOURCE = '''
import datetime as _parl_datetime, os as _parl_os, subprocess as _parl_subprocess
import time as _parl_time

_PARL_SHIFT = [0.0]


def _parl_clock():
    """Patch this process: what is made stays of the real types."""
    time, real = _parl_time, {}
    for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime"):
        real[name] = getattr(time, name)
    time.time = lambda: real["time"]() + _PARL_SHIFT[0]
    time.time_ns = lambda: real["time_ns"]() + int(_PARL_SHIFT[0]) * 10**9
    time.localtime = lambda s=None: real["localtime"](time.time() if s is None else s)
    time.gmtime = lambda s=None: real["gmtime"](time.time() if s is None else s)
    time.ctime = lambda s=None: real["ctime"](time.time() if s is None else s)
    time.strftime = lambda f, t=None: real["strftime"](f, time.localtime() if t is None else t)
    moment, day = _parl_datetime.datetime, _parl_datetime.date

    def ahead():
        return _parl_datetime.timedelta(seconds=_PARL_SHIFT[0])

    class Front(type):
        def __instancecheck__(cls, value):
            return isinstance(value, cls.__mro__[1])

        def __subclasscheck__(cls, other):
            return issubclass(other, cls.__mro__[1])

    class Moment(moment, metaclass=Front):
        def __new__(cls, *args, **kwargs):
            return moment(*args, **kwargs)

        @classmethod
        def now(cls, tz=None):
            return moment.now(tz) + ahead()

        @classmethod
        def utcnow(cls):
            return moment.now(_parl_datetime.timezone.utc).replace(tzinfo=None) + ahead()

        @classmethod
        def today(cls):
            return moment.now() + ahead()

    class Day(day, metaclass=Front):
        def __new__(cls, *args, **kwargs):
            return day(*args, **kwargs)

        @classmethod
        def today(cls):
            return (moment.now() + ahead()).date()

    _parl_datetime.datetime, _parl_datetime.date = Moment, Day


def _parl_children(preamble):
    """Python programs that this process starts get the same clock."""
    start = _parl_subprocess.Popen.__init__

    def begin(self, args, *rest, **more):
        if isinstance(args, (list, tuple)) and _PARL_SHIFT[0]:
            args = _parl_command([_parl_os.fspath(word) for word in args], preamble)
        start(self, args, *rest, **more)

    _parl_subprocess.Popen.__init__ = begin


def _parl_command(words, preamble):
    if not words or not _parl_os.path.basename(str(words[0])).startswith("python"):
        return words
    at = 1
    while at < len(words) and str(words[at]).startswith("-") and words[at] not in ("-c", "-m", "-"):
        at += 2 if words[at] in ("-X", "-W") else 1
    if at >= len(words) or words[at] == "-":
        return words
    kind = words[at] if words[at] in ("-c", "-m") else "file"
    target, arguments = words[at + (kind != "file")], words[at + 1 + (kind != "file"):]
    start = f"""
_PARL_SHIFT[0] = {_PARL_SHIFT[0]!r}
_parl_clock()
_parl_children(_PARL_PREAMBLE)
import sys as _parl_sys
_parl_sys.argv[0] = {target if kind == "file" else kind!r}
if {kind == "file"} and not _parl_sys.flags.isolated:
    _parl_sys.path[0] = _parl_os.path.dirname(_parl_os.path.abspath({target!r}))
if {kind == "-c"}:
    exec(compile({target!r}, "<string>", "exec"), {{"__name__": "__main__"}})
else:
    import runpy as _parl_runpy
    _parl_run = _parl_runpy.run_module if {kind == "-m"} else _parl_runpy.run_path
    _parl_run({target!r}, run_name="__main__")
"""
    code = f"_PARL_PREAMBLE = {preamble!r}\\nexec(_PARL_PREAMBLE)\\n" + start
    return [*words[:at], "-c", code, *arguments]
'''

_WRAPPED = """
_PARL_PREAMBLE = {preamble!r}
exec(compile(_PARL_PREAMBLE, "<clock>", "exec"))
_parl_clock()
_parl_children(_PARL_PREAMBLE)
exec(compile({source!r}, "<tools.py>", "exec"), globals())
_parl_setup = globals().get("setup")


def setup(data):
    data = dict(data)
    _PARL_SHIFT[0] = float(data.pop({key!r}, 0.0))
    if _parl_setup is not None:
        _parl_setup(data=data)
"""


def clock_bundle(bundle: ToolBundle) -> ToolBundle:
    """The task's tools under a clock that ``clock_spec`` sets."""
    source = _WRAPPED.format(preamble=CLOCK_SOURCE, source=bundle.tools_source, key=SHIFT_KEY)
    return replace(bundle, tools_source=source)


def clock_spec(spec: TaskSpec, bundle: ToolBundle, shift: timedelta) -> TaskSpec:
    """``spec`` for a clock bundle, at another time."""
    data = {**spec.environment.data, SHIFT_KEY: shift.total_seconds()}
    environment = replace(spec.environment, data=data)
    return replace(spec, bundle=bundle.hash, environment=environment)


async def run_clock(
    stage: Stage,
    at: Callable[[timedelta], TaskSpec],
    shifts: Sequence[timedelta],
    oracle: Script,
    seeded: bool,
) -> Step:
    """``at``: the task with a clock that is so far ahead, for ``stage``. ``seeded``: also equal
    answers are expected, as one seed is one world."""
    step = Step("clock")
    usual = await stage.play(at(timedelta()), oracle)
    if not usual.passed:
        step.add(
            "not-checked",
            "clock",
            "the solution does not pass while its clock is watched, though nothing is changed "
            f"({_end_of(usual)}); other days are not tried",
            "warning",
        )
        return step
    again = await stage.play(at(timedelta()), oracle)
    same = seeded and _texts(usual) == _texts(again)
    for shift in shifts:
        played = await stage.play(at(shift), oracle)
        when = _when(shift)
        # a read that fails does not stop the solution, which knows the answer: it stops a policy
        worse = not played.passed or _errors(played) != _errors(usual)
        if worse and await _by_luck(stage, at, oracle, shift):
            step.add("flaky", f"clock {when}", f"the solution succeeds only sometimes: "
                     f"{_end_of(played)}")  # fmt: skip
            break
        if worse:
            step.add(
                "clock-dependent",
                f"clock {when}",
                f"the solution succeeds now but not {when}: {_end_of(played)}; give the world a "
                "date of its own (environment/data.json)",
            )
            break
        if same and _texts(played) != _texts(usual):
            pairs = zip(_texts(usual), _texts(played), strict=False)
            shown = next(((a, b) for a, b in pairs if a != b), ("", ""))
            step.add(
                "clock-dependent",
                f"clock {when}",
                f"the same calls answer {shown[0][:80]!r} now and {shown[1][:80]!r} {when}; one "
                "seed should be one world on every day",
                "warning",
            )
            break
    step.note = f"{len(shifts)} other times"
    return step


async def _by_luck(
    stage: Stage, at: Callable[[timedelta], TaskSpec], oracle: Script, shift: timedelta
) -> bool:
    """Whether the same time gives another end, or no other time does."""
    again = await stage.play(at(shift), oracle)
    usual = await stage.play(at(timedelta()), oracle)
    here, now = (again.passed, _errors(again)), (usual.passed, _errors(usual))
    return here == now or not usual.passed


def _when(shift: timedelta) -> str:
    moment = datetime.now(UTC) + shift
    hours = shift.total_seconds() / 3600
    return f"at {hours:+.0f} h ({moment:%A %H:%M}, {moment:%Y-%m-%d})"


def _errors(played: Played) -> list[str | None]:
    return [seen.error for seen in played.observations]


def _texts(played: Played) -> list[str]:
    return [seen.text for seen in played.observations]


def _end_of(played: Played) -> str:
    """What went wrong, in short."""
    if played.stop is not None or played.errors:
        return (played.errors or [played.start_text])[0][:160]
    return str(played.verdict.error or "; ".join(played.verdict.reasons))[:160]
