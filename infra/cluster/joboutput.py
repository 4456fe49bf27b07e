"""Reads what `ray job submit` (Ray 2.60) prints: the job's lines, its end, and why it failed."""

from __future__ import annotations

import re
from collections import deque

from infra.cluster.auth import HINT

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CLI = re.compile(r"^[\d :,-]+\t?\w+ cli\.py:\d+ -- (.*)$")
_SUBMITTED = re.compile(r"^Job '(.+)' submitted successfully$")
_ENDED = re.compile(r"^Job '.+' (succeeded|failed)$|^Job '.+' was (stopped)$")
_EXIT_CODE = re.compile(r"failed with exit code (-?\d+)")
# "ValueError: x", "pkg.Error: y", and the one-line errors of our own command line
_ERROR_LINE = re.compile(r"^(parl: |[\w.]*(Error|Exception|Interrupt|Exit)\b)")
_NOISE = re.compile(r"^\s*$|^-+$|^\([^)]*pid=|^\d{4}-\d\d-\d\d .*(job_manager|worker|node)\.py:")


class JobOutput:
    """Fed line by line; a state machine of three parts: client chatter, job, verdict."""

    def __init__(self) -> None:
        self.submission_id = ""
        self.accepted = False
        self.status = ""
        """succeeded, failed or stopped; empty while unknown."""
        self._tailing = False
        self._message: list[str] = []
        self._tail: deque[str] = deque(maxlen=200)

    def feed(self, line: str) -> str | None:
        """One line of the client; returns it when it is the job's own."""
        line = _ANSI.sub("", line)
        client = _CLI.match(line)
        if client is not None:
            self._client_line(client[1])
            return None
        if self.status:
            self._message.append(line)
        elif self._tailing:
            self._tail.append(line)
            return line
        return None

    def cause(self) -> str:
        """Why the job did not succeed, in one line."""
        name = f"job {self.submission_id}"
        if self.status == "stopped":
            return f"{name} was stopped before it ended"
        message = self._message[0] if self._message else "no status message"
        code = _EXIT_CODE.search(message)
        if code is None:
            return f"{name} failed: {message.rstrip(':').strip()}"
        return f"{name} failed with exit code {code[1]}: {_last_error(list(self._tail))}"

    def _client_line(self, text: str) -> None:
        submitted, ended = _SUBMITTED.match(text), _ENDED.match(text)
        if submitted:
            self.accepted = True
            self.submission_id = submitted[1]
        elif text.startswith("Tailing logs until the job exits"):
            self._tailing = True
        elif ended:
            self.status = ended[1] or ended[2]
        elif text.startswith("Status message: "):
            self._message.append(text.removeprefix("Status message: "))


def client_cause(errors: str, address: str, submission_id: str) -> str:
    """Why the client itself gave up, from its stderr, in one line."""
    if "Failed to connect to Ray at address" in errors:
        return (
            f"no Ray head node answers at {address}; start one with `ray start --head` or give the "
            "address of its dashboard"
        )
    if "Authentication required" in errors:
        return f"Ray at {address} wants a token (401); {HINT}"
    if "Authentication failed" in errors:
        return f"Ray at {address} refuses our token (403); {HINT}"
    if re.search(r"submission_id .* already exists", errors):
        return (
            f"submission id {submission_id!r} was used before on {address}; give another one (an "
            "id names one attempt)"
        )
    lost = f"job {submission_id}: lost contact: " if submission_id else "cannot submit: "
    return f"{lost}{_last_error(errors.splitlines())}"


def _last_error(lines: list[str]) -> str:
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return line.strip()
    for line in reversed(lines):
        if not _NOISE.match(line):
            return line.strip()
    return "it printed nothing; see `ray job logs`"
