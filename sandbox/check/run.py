"""check_folder and check_family: every step in order, one report."""

from __future__ import annotations

import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from sandbox.catalog.base import Family
from sandbox.check.binomial import upper_bound
from sandbox.check.build import check_build
from sandbox.check.cassettes import check_cassettes, missed_calls
from sandbox.check.certificate import MIN_REPEAT
from sandbox.check.clock import SHIFTS, clock_bundle, clock_spec, run_clock
from sandbox.check.determinism import run_determinism, variant_bundle, variant_spec
from sandbox.check.effects import run_effects
from sandbox.check.episodes import Played, Stage, open_stage
from sandbox.check.findings import CheckReport, Step
from sandbox.check.hidden import solution_without_reading
from sandbox.check.idle import idle_is_paid, nop_is_paid
from sandbox.check.leaks import run_leaks
from sandbox.check.lint import lint_folder
from sandbox.check.partial import half_right
from sandbox.check.probe import probe_bundle, probe_spec
from sandbox.check.reads import never_played
from sandbox.check.scripts import NOP, echo_script, random_script
from sandbox.check.shell_clock import SHELL_SHIFTS, shell_clock_spec
from sandbox.check.stated import stated_form
from sandbox.check.subject import (
    Case,
    Subject,
    content_hash,
    family_subject,
    folder_subject,
    special_files,
)
from sandbox.check.tamper import run_tamper
from sandbox.check.timing import CountTokens, check_timing, utf8_tokens
from sandbox.check.worlds import other_process, same_world
from sandbox.check.written import Written, written_by
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.fakes import MemoryLeases
from sandbox.shelf import Leases
from sandbox.shell.world import BUNDLE_NAME
from sandbox.task import ToolBundle

CHECK_VERSION = "6"
"""Goes into certificates; raise it when a step or rule is added."""
NUM_RANDOM = 5


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """``repeat``: episodes of the oracle and of nop each (a family: instances of a type); with
    fewer than ``certificate.MIN_REPEAT`` the report says so and is never certified."""

    repeat: int = 20
    config: SandboxConfig = field(default_factory=SandboxConfig)
    build_image: bool = False
    count_tokens: CountTokens = utf8_tokens
    say: Callable[[str], None] = lambda line: None


async def check_folder(
    folder: Path, settings: CheckSettings | None = None, leases: Leases | None = None
) -> CheckReport:
    """Check a task folder. TaskError when there is none; every flaw of an existing one is a
    finding. BackendUnavailable and SandboxLost come through: they say nothing about the task."""
    settings = settings or CheckSettings()
    if not (folder / "task.toml").is_file():
        raise TaskError(f"{folder}: no task.toml; `parl task new` makes a task folder")
    schema = Step("schema")
    special = special_files(folder)
    for path in special:
        schema.add(
            "special-file",
            path.relative_to(folder).as_posix(),
            "is neither file, folder nor link; a task folder holds only those",
        )
    if special:  # neither hashed nor read
        report = _report_of(str(folder), folder.resolve().name, "", "")
        report.steps = [schema]
        return report
    begin = time.perf_counter()
    lint = lint_folder(folder)
    lint.elapsed_s = time.perf_counter() - begin
    try:
        subject = folder_subject(folder, settings.config)
    except TaskError as error:
        rule = "no-solution" if "/solution: no calls.jsonl" in str(error) else "invalid-task"
        schema.add(rule, "task.toml", str(error))
        report = _report_of(str(folder), folder.resolve().name, "", content_hash(folder))
        report.steps = [schema, lint]
        return report
    return await _check(subject, settings, leases or MemoryLeases(), [schema, lint])


async def check_family(
    family: Family,
    task_type: str | None,
    settings: CheckSettings | None = None,
    leases: Leases | None = None,
) -> CheckReport:
    """Check a shipped family (or one of its types) on its first instances."""
    settings = settings or CheckSettings()
    subject = family_subject(family, task_type, settings.repeat)
    return await _check(subject, settings, leases or MemoryLeases(), [Step("schema")])


def _report_of(target: str, name: str, version: str, digest: str) -> CheckReport:
    return CheckReport(
        target=target,
        name=name,
        version=version,
        content_hash=digest,
        versions={
            "check": CHECK_VERSION,
            "parl": _version(),
            "python": platform.python_version(),
        },
    )


def _version() -> str:
    try:
        return metadata.version("parl-agent")
    except metadata.PackageNotFoundError:
        return "unknown"


async def _check(
    subject: Subject, settings: CheckSettings, leases: Leases, steps: list[Step]
) -> CheckReport:
    report = _report_of(subject.target, subject.name, subject.version, subject.content_hash)
    report.notes = list(subject.notes)
    report.task_ids = [case.spec.content_hash for case in subject.cases]
    report.task_types = list(dict.fromkeys(case.spec.task_type for case in subject.cases))
    report.steps = steps
    if settings.repeat < MIN_REPEAT:
        report.notes.append(
            f"{settings.repeat} episodes of oracle and nop each are too few to certify; "
            f"{MIN_REPEAT} are needed"
        )
    checker = _Checker(subject, settings, leases, report)
    spec = subject.cases[0].spec
    async with open_stage(spec, subject.bundle, settings.config, leases) as stage:
        report.level = stage.level
        await checker.play_agents(stage)
    if not checker.can_start:
        return report
    probe = probe_bundle(subject.bundle)
    async with open_stage(spec, probe, settings.config, leases) as stage:
        await checker.probe(stage, probe)
    variants = variant_bundle(replace(subject.bundle, tools_source=probe.tools_source))
    async with open_stage(spec, variants, settings.config, leases) as stage:
        await checker.judge_again(stage, probe, variants)
    clocks = subject.bundle
    if subject.bundle.name != BUNDLE_NAME:
        clocks = clock_bundle(subject.bundle)
    async with open_stage(spec, clocks, settings.config, leases) as stage:
        await checker.other_days(stage, clocks)
    checker.offline()
    return report


class _Checker:
    """The steps of one check; each appends to the report."""

    def __init__(
        self, subject: Subject, settings: CheckSettings, leases: Leases, report: CheckReport
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._leases = leases
        self._report = report
        self._oracle_runs: list[tuple[Case, Played]] = []
        self._written: dict[str, Written] = {}
        self.can_start = True

    def first_of_each_type(self) -> list[Case]:
        seen: dict[str, Case] = {}
        for case in self._subject.cases:
            seen.setdefault(case.spec.task_type, case)
        return list(seen.values())

    async def step(self, work: Awaitable[Step]) -> Step:
        """Time a step, merge it with one of the same name, tell the caller."""
        begin = time.perf_counter()
        step = await work
        step.elapsed_s = time.perf_counter() - begin
        return self._keep(step)

    def _keep(self, step: Step) -> Step:
        for known in self._report.steps:
            if known.name == step.name:
                for finding in step.findings:
                    known.add(finding.rule, finding.where, finding.message, finding.severity)
                known.elapsed_s += step.elapsed_s
                return known
        self._report.steps.append(step)
        self._settings.say(f"{step.status:5} {step.name} ({step.elapsed_s:.1f} s) {step.note}")
        return step

    async def play_agents(self, stage: Stage) -> None:
        """build, oracle, nop, agents, attacks."""
        begin = time.perf_counter()
        first = await stage.play(self._subject.cases[0].spec, NOP)
        build = check_build(
            self._subject.folder, first, self._settings.build_image, timeout_s=600.0
        )
        build.elapsed_s = time.perf_counter() - begin
        self._keep(build)
        if first.stop is not None:
            self.can_start = False
            return
        await self.step(self._oracle(stage))
        await self.step(self._nop(stage))
        await self.step(self._agents(stage))
        await self.step(self._attacks(stage))
        self._flakes()

    async def probe(self, stage: Stage, probe: ToolBundle) -> None:
        """tamper, leaks, effects: with code inside the box."""
        for case in self.first_of_each_type():
            spec = probe_spec(case.spec, probe)
            written = await written_by(stage, spec, case.oracle)
            self._written[case.spec.task_type] = written
            oracle = Step("oracle")
            self._same_elsewhere(case, written.texts, oracle)
            solution_without_reading(case, written.texts, oracle)
            stated_form(case, oracle)
            self._keep(oracle)
            bundle = self._subject.bundle
            await self.step(run_tamper(stage, spec, bundle, case.oracle, written))
            await self.step(run_leaks(stage, spec, case, self._subject, written))
            effects = run_effects(stage, spec, case, written)
            never_played(list(self._subject.cases), bundle.name, await self.step(effects))

    async def judge_again(self, stage: Stage, probe: ToolBundle, variants: ToolBundle) -> None:
        """determinism: also over half a result. ``variants`` has the probe's tools."""
        for case in self.first_of_each_type():
            spec = variant_spec(probe_spec(case.spec, probe), variants)
            scripts = [case.oracle, NOP, echo_script(case.spec)]
            written = self._written[case.spec.task_type]
            half = half_right(case.spec, self._subject.bundle, case.oracle, written)
            step = await self.step(run_determinism(stage, spec, scripts, half))
            oracle = Step("oracle")
            self._same_elsewhere(case, tuple(step.data.pop("texts", ())), oracle)
            self._keep(oracle)

    async def other_days(self, stage: Stage, clocks: ToolBundle) -> None:
        """clock. ``clocks``: the clock bundle, or the shell world's own."""
        shell = clocks.name == BUNDLE_NAME
        for case in self.first_of_each_type():
            if shell:
                at, shifts = partial(shell_clock_spec, case.spec), SHELL_SHIFTS
            else:
                at, shifts = partial(clock_spec, case.spec, clocks), SHIFTS
            work = run_clock(stage, at, shifts, case.oracle, self.seeded() and not shell)
            step = await self.step(work)
            if shell:
                step.note += "; `date` and `python3` by PATH only, no other program's clock"

    def _repeated(self) -> list[Case]:
        """A folder's one case N times; a family's cases once each."""
        cases = list(self._subject.cases)
        return cases * self._settings.repeat if len(cases) == 1 else cases

    async def _oracle(self, stage: Stage) -> Step:
        step = Step("oracle")
        cases = self._repeated()
        for case in cases:
            self._oracle_runs.append((case, await stage.play(case.spec, case.oracle)))
        passed = sum(played.passed for _, played in self._oracle_runs)
        step.data = {"passed": passed, "runs": len(cases),
                     "first": self._oracle_runs[0][1].summary()}  # fmt: skip
        step.note = f"{passed} of {len(cases)} pass"
        if passed == 0:
            step.add("oracle-fails", "solution/", _why(self._oracle_runs[0][1]))
        elif passed < len(cases):
            failed = next(played for _, played in self._oracle_runs if not played.passed)
            rule = "flaky" if len(self._subject.cases) == 1 else "oracle-fails"
            share = f"{passed} of {len(cases)} times"
            step.add(rule, "solution/", f"the oracle passes {share}: {_why(failed)}")
        if len(self._subject.cases) == 1:
            same_world([played for _, played in self._oracle_runs], self.seeded(), step)
        return step

    def _same_elsewhere(self, case: Case, texts: tuple[str, ...], step: Step) -> None:
        """The answers of the first run and those in another process, unless they differ anyway."""
        told = any(each.rule == "nondeterministic-world" for each in self._report.findings)
        runs = [played for run, played in self._oracle_runs if run is case]
        if runs and not told:
            other_process(runs[0].observations, texts, self.seeded(), step)

    def seeded(self) -> bool:
        """Whether the task says that equal seeds give equal worlds."""
        folder = self._subject.folder
        if folder is None:
            return True
        from sandbox.manifest.reading import read_toml

        parl = read_toml(folder / "task.toml").get("metadata", {}).get("parl")
        return isinstance(parl, dict) and parl.get("determinism", "seeded") == "seeded"

    async def _nop(self, stage: Stage) -> Step:
        step = Step("nop")
        runs = [await stage.play(case.spec, NOP) for case in self._repeated()]
        passed = sum(played.passed for played in runs)
        step.data = {"passed": passed, "runs": len(runs), "first": runs[0].summary()}
        step.note = f"{passed} of {len(runs)} pass"
        self._nop_runs = runs
        if passed:
            step.add(
                "passing-nop",
                "tests/",
                f"doing nothing passes {passed} of {len(runs)} times "
                f"({'; '.join(runs[0].verdict.reasons)[:120]})",
            )
        nop_is_paid(runs, step)
        broken = next((played for played in runs if played.verdict.error is not None), None)
        if broken is not None:
            step.add(
                "verifier-error",
                "tests/",
                f"no verdict for an agent that does nothing ({str(broken.verdict.error)[:160]}); "
                "it must be a low score, because a missing verdict is never trained on",
            )
        return step

    async def _agents(self, stage: Stage) -> Step:
        step = Step("agents")
        count = 0
        for case in self.first_of_each_type():
            scripts = [echo_script(case.spec)]
            scripts += [random_script(case.spec, seed) for seed in range(NUM_RANDOM)]
            for script in scripts:
                played = await stage.play(case.spec, script)
                count += 1
                if played.passed:
                    rule = "passing-echo" if script.name == "echo" else "passing-random"
                    step.add(
                        rule,
                        f"agent {script.name}",
                        f"scored {played.verdict.correctness} on {case.spec.name}, which passes",
                    )
                elif played.verdict.error is not None:
                    step.add(
                        "verifier-error",
                        f"agent {script.name}",
                        f"no verdict: {played.verdict.error[:160]}",
                    )
                else:
                    idle_is_paid(played, step)
        step.note = f"{count} episodes"
        return step

    async def _attacks(self, stage: Stage) -> Step:
        step = Step("attacks")
        spec = self._subject.cases[0].spec
        for script in self._subject.attacks:
            played = await stage.play(spec, script)
            if played.passed:
                step.add(
                    "attack-passes",
                    f"attacks/{script.name}",
                    f"scored {played.verdict.correctness}, which passes",
                )
        step.note = f"{len(self._subject.attacks)} of the author's"
        return step

    def _flakes(self) -> None:
        """Runs against the majority of their kind; an exact binomial bound on their rate."""
        if len(self._subject.cases) > 1:
            failures = sum(not played.passed for _, played in self._oracle_runs)
            failures += sum(played.passed for played in self._nop_runs)
        else:
            passed = sum(played.passed for _, played in self._oracle_runs)
            failures = min(passed, len(self._oracle_runs) - passed)
            passed = sum(played.passed for played in self._nop_runs)
            failures += min(passed, len(self._nop_runs) - passed)
        trials = len(self._oracle_runs) + len(self._nop_runs)
        self._report.flake = {
            "failures": failures,
            "trials": trials,
            "rate": failures / trials,
            "upper_95": upper_bound(failures, trials),
            "repeat": self._settings.repeat,
        }

    def offline(self) -> None:
        """cassettes and timing."""
        case = self._subject.cases[0]
        if self._subject.folder is not None:
            cassettes = check_cassettes(self._subject.folder, case.spec, case.oracle)
            texts = [seen.text for seen in self._oracle_runs[0][1].observations]
            missed_calls(texts, cassettes)
            self._keep(cassettes)
        timing, suggestions = check_timing(
            self._subject.cases, self._oracle_runs, self._settings.count_tokens
        )
        self._report.suggestions = suggestions
        self._keep(timing)


def _why(played: Played) -> str:
    """The first thing that went wrong in an episode, in one line."""
    if played.verdict.error is not None:
        return f"no verdict: {played.verdict.error[:200]}"
    if played.stop is not None:
        return f"the session stopped it: {played.stop} ({played.observations[-1].text[:160]})"
    if played.errors:
        return f"a call failed: {played.errors[0][:200]}"
    reasons = "; ".join(played.verdict.reasons)[:200] or "no reason given"
    return f"correctness {played.verdict.correctness}: {reasons}"
