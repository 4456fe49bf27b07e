"""What a check says: findings, steps, the whole report."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]
Status = Literal["pass", "fail", "skip"]


MAX_ALIKE = 4
"""More findings of one rule in a step are told by their first and a count."""
FOLLOWING = frozenset({"agents", "attacks", "tamper"})
"""Steps whose findings follow from a verifier that pays doing nothing."""
_PASSES = "which passes"


@dataclass(frozen=True, slots=True)
class Finding:
    """One flaw. ``rule`` is its fixed name, ``where`` a file (and line) or an agent."""

    rule: str
    where: str
    message: str
    severity: Severity = "error"


@dataclass(slots=True)
class Step:
    """One part of the check. ``note`` says why it was skipped or what it saw."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    skipped: bool = False
    elapsed_s: float = 0.0

    @property
    def status(self) -> Status:
        if any(finding.severity == "error" for finding in self.findings):
            return "fail"
        return "skip" if self.skipped else "pass"

    def add(self, rule: str, where: str, message: str, severity: Severity = "error") -> None:
        """Append a finding, once."""
        finding = Finding(rule, where, message, severity)
        if finding not in self.findings:
            self.findings.append(finding)


@dataclass(slots=True)
class CheckReport:
    """``content_hash``: of the folder, or of a family's code and instances. ``task_ids``: content
    hashes of the TaskSpecs that were run."""

    target: str
    name: str
    version: str
    content_hash: str
    task_ids: list[str] = field(default_factory=list)
    task_types: list[str] = field(default_factory=list)
    level: str = ""
    steps: list[Step] = field(default_factory=list)
    suggestions: dict[str, Any] = field(default_factory=dict)
    flake: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every step ran or was skipped for a stated reason, and none found an error."""
        return bool(self.steps) and all(step.status != "fail" for step in self.steps)

    @property
    def findings(self) -> list[Finding]:
        """Of all steps, errors first."""
        every = [finding for step in self.steps for finding in step.findings]
        return sorted(every, key=lambda finding: finding.severity)

    @property
    def rules(self) -> set[str]:
        """Names of the errors found."""
        return {finding.rule for finding in self.findings if finding.severity == "error"}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the verdict in front."""
        plain = asdict(self)
        for step, made in zip(plain["steps"], self.steps, strict=True):
            step["status"] = made.status
        return {"passed": self.passed, **plain}

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def shown_findings(step: Step, nop_passes: bool) -> list[tuple[Finding, int]]:
    """Findings for a person, each with the number of those left out: many of one rule are told
    once; where doing nothing passes, all that passes as well follows from it."""
    told = list(step.findings)
    found: list[tuple[Finding, int]] = []
    if nop_passes and step.name in FOLLOWING:
        passes = [each for each in told if each.severity == "error" and _PASSES in each.message]
        if passes:
            told = [each for each in told if each not in passes]
            rules = ", ".join(dict.fromkeys(each.rule for each in passes))
            text = (
                f"{len(passes)} results that are not right pass as well ({rules}), as doing "
                "nothing does; repair that first (--json has them all)"
            )
            found.append((Finding("passing-nop", "follows from it", text), 0))
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in told:
        groups.setdefault((finding.rule, finding.severity), []).append(finding)
    for group in groups.values():
        shown = group if len(group) <= MAX_ALIKE else group[:1]
        found += [(each, 0) for each in shown[:-1]]
        found.append((shown[-1], len(group) - len(shown)))
    return found


def report_text(report: CheckReport) -> str:
    """The report for a person: a line a step, a line a finding, the numbers, the verdict."""
    lines = [f"{report.name} ({report.target})", f"content  {report.content_hash[:16]}"]
    lines += [f"note     {note}" for note in report.notes]
    for step in report.steps:
        tail = f"  {step.note}" if step.note else ""
        lines.append(f"{step.status:5}    {step.name:12} {step.elapsed_s:6.2f} s{tail}")
        for finding, more in shown_findings(step, "passing-nop" in report.rules):
            lines.append(f"         {finding.severity}: {finding.rule}: {finding.where}")
            lines.append(f"           {finding.message}")
            if more:
                lines.append(f"           and {more} more of this rule (--json has them all)")
    if report.flake:
        flake = report.flake
        lines.append(
            f"flakes   {flake['failures']} of {flake['trials']} runs; rate below "
            f"{flake['upper_95']:.3f} with 95 % confidence"
        )
    lines += [f"suggest  {key} = {value}" for key, value in report.suggestions.items()]
    errors = sum(finding.severity == "error" for finding in report.findings)
    lines.append("passed" if report.passed else f"failed: {errors} errors")
    return "\n".join(lines)
