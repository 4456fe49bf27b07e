"""Access rules: method, host and path of a request against globs. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from sandbox.proxy.config import AccessRule


def rule_matches(rule: AccessRule, method: str, host: str, path: str) -> bool:
    """All three parts of the rule match; ``path`` is percent-encoded and has no query."""
    return (
        method_matches(rule.methods, method)
        and host_matches(rule.host, host)
        and path_matches(rule.path, path)
    )


def allowed(
    allow: Iterable[AccessRule], deny: Iterable[AccessRule], method: str, host: str, path: str
) -> bool:
    """Some rule of ``allow`` matches and none of ``deny``; an empty ``allow`` allows nothing."""
    if any(rule_matches(rule, method, host, path) for rule in deny):
        return False
    return any(rule_matches(rule, method, host, path) for rule in allow)


def method_matches(methods: tuple[str, ...], method: str) -> bool:
    return "*" in methods or method.upper() in methods


def host_matches(pattern: str, host: str) -> bool:
    """ "*" any, "*.a.b" any name below a.b (not a.b itself), else the exact name."""
    pattern, host = pattern.lower(), host.lower().rstrip(".")
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern


def path_matches(pattern: str, path: str) -> bool:
    """Whole-path glob: * stays within a segment, ** crosses segments, /** also matches nothing."""
    return _compiled(pattern).fullmatch(path) is not None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    # possessive and atomic forms are not needed: no alternative overlaps its neighbour
    out, position = [], 0
    for found in re.finditer(r"/\*\*$|\*\*|\*", pattern):
        out.append(re.escape(pattern[position : found.start()]))
        out.append({"/**": "(?:/.*)?", "**": ".*", "*": "[^/]*"}[found.group()])
        position = found.end()
    out.append(re.escape(pattern[position:]))
    return re.compile("".join(out), re.DOTALL)
