"""Does the solution's answer have the form that the instruction asks for? Do tests follow links?

Only forms that an instruction states in plain English are looked for; anything else is not judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from sandbox.check.findings import Step
from sandbox.check.scripts import SHELL_ANSWER
from sandbox.check.subject import Case

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\n")
_ANSWERS = re.compile(r"(?i)\b(answer|reply|respond)\b")
_LINK_CHECKS = re.compile(
    r"is_symlink|islink|O_NOFOLLOW|lstat|realpath|resolve\(|readlink|\s-[Lh]\s"
)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:  # the question itself
        return False
    return True


_FORMS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (r"(?i)\bdigits only\b|\bonly digits\b|\bwith only (the|a) number\b"
     r"|\bwith (the|a) number only\b",
     lambda text: re.fullmatch(r"[-+\u2212]?[\d.,]+", text) is not None),
    (r"(?i)\bin (lower ?case|small letters)\b", lambda text: text == text.lower()),
    (r"(?i)\bin (upper ?case|capital letters|capitals)\b", lambda text: text == text.upper()),
    (r"\bJSON (object|list|array)\b", _is_json),
    (r"(?i)\b(two|2) decimals\b", lambda text: re.search(r"\d\.\d{2}(?!\d)", text) is not None),
    (r"(?i)\b(one|1) decimal\b", lambda text: re.search(r"\d\.\d(?!\d)", text) is not None),
    (r"(?i)\byes or no\b", lambda text: text.casefold() in ("yes", "no")),
)  # fmt: skip


def stated_form(case: Case, step: Step) -> None:
    """The verifier pays the solution; where the instruction asks for another form, it is a policy
    that does as told which is not paid."""
    answer = case.oracle.final_text.strip()
    if not answer or answer == SHELL_ANSWER:
        return
    for sentence in _SENTENCE.split(case.spec.instruction):
        if not _ANSWERS.search(sentence):
            continue
        for pattern, holds in _FORMS:
            found = re.search(pattern, sentence)
            if found is not None and not holds(answer):
                step.add(
                    "instruction-contradicts",
                    "instruction.md",
                    f"asks for {found[0]!r}, but the solution answers {answer[:60]!r} and is paid; "
                    "one of them is wrong",
                )


def lint_links(folder: Path, step: Step) -> None:
    """Tests that compare a file of the agent's with one of their own and follow links: elsewhere
    than here a link to the right file passes. (Here links are never collected.)"""
    tests = [path for path in sorted((folder / "tests").rglob("*"))
             if path.suffix in (".py", ".sh") and path.is_file()]  # fmt: skip
    texts = {path: path.read_text("utf-8", "replace") for path in tests}
    if (folder / "tools").is_dir() or any(_LINK_CHECKS.search(text) for text in texts.values()):
        return
    own = [path.name for path in (folder / "tests").rglob("*")
           if path.is_file() and path not in texts]  # fmt: skip
    for path, text in texts.items():
        named = [name for name in own if name in text]
        if named and re.search(r"/(app|workspace|testbed|root|home)/", text):
            step.add(
                "follows-links",
                path.relative_to(folder).as_posix(),
                f"compares the agent's file with {named[0]} and does not ask whether it is a link: "
                f"where links are kept, one to /tests/{named[0]} passes; refuse links",
                "warning",
            )
