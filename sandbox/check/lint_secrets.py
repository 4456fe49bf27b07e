"""Credentials written into a task's files."""

from __future__ import annotations

import re
from pathlib import Path

from sandbox.check.findings import Step

MAX_BYTES = 1 << 20
_SHAPES = {
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})"),
    "an API key": re.compile(r"\b(?:sk|rk|pk)[-_](?:[a-z]+[-_])*[A-Za-z0-9_-]{20,}"),
    "a Slack token": re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    "a Google key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"),
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "a JSON web token": re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[\w-]{10,}"),
    "a password in a URL": re.compile(
        r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'${}<]+:[^\s/@\"'${}<]{3,}@"
    ),
    "a bearer token": re.compile(r"(?i)\bbearer\s+(?![${<])[A-Za-z0-9._~+/-]{12,}"),
    "a basic authorization": re.compile(r"(?i)\bbasic\s+[A-Za-z0-9+/]{12,}={0,2}(?![\w+/])"),
}
_NAMED = re.compile(
    r"""(?ix) \b (?P<name> [a-z0-9_-]* (?: api[_-]?key | secret | passw(?:or)?d | passwd
    | access[_-]?key | auth[_-]?token | api[_-]?token | private[_-]?key | credentials?
    | token ) (?!s\b|s_|izer) [a-z0-9_-]* ) ["']? \s* (?: [:=] | => ) \s*
    (?: (?P<quote>["'])(?P<quoted>[^"'\n]{4,}?)(?P=quote) | (?P<bare>[^\s"',;}\])]{6,}) )"""
)
_HARMLESS = re.compile(
    r"(?i)^(?:\$|<|\{|%|x{3,}|\*{3,}|\.{3}|your[_-]|change[_-]?me|example|placeholder|dummy|none$"
    r"|null$|true$|false$|os\.|env|getenv|self\.|data\[|str\b|string|int\b|get_|\w+\(|\w+\[)"
)


def lint_secrets(folder: Path, files: list[Path], step: Step) -> None:
    """One finding a line that holds something shaped or named like a credential."""
    for path in files:
        name = path.relative_to(folder).as_posix()
        if path.name in (".env", ".netrc", "id_rsa", "id_ed25519", ".pypirc", "credentials"):
            step.add("secret-literal", name, "is a file of credentials; take it out of the task")
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
            continue
        text = path.read_text("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), start=1):
            found = _secret(line[:4000], code=path.suffix == ".py")
            if found is not None:
                step.add(
                    "secret-literal",
                    f"{name}:{number}",
                    f"holds {found}; a task is copied to every machine, so name it as ${{VAR}} and "
                    "let the proxy add it",
                )


def _secret(line: str, code: bool) -> str | None:
    for what, shape in _SHAPES.items():
        if shape.search(line):
            return what
    for match in _NAMED.finditer(line):
        value = match["quoted"] or match["bare"]
        if _HARMLESS.match(value):
            continue
        if match["quoted"] is None and (code or not re.search(r"\d", value)):
            continue  # in code a bare word is a name; elsewhere a word without digits is prose
        if " " in value or value.isdigit():
            continue
        return f"a literal value for {match['name']!r}"
    return None
