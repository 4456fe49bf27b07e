"""One seed, one world: the same calls answer the same in every episode and in every process."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sandbox.check.episodes import Played
from sandbox.check.findings import Step
from sandbox.session import Observation

_CUT = re.compile(r"\n\[cut: \d+ bytes\]\Z")
_TIMES = re.compile(r"\d+(\.\d+)? ?(ms|s|sec|seconds)\b")
"""How long a call took is no part of its answer."""


def same_world(runs: Sequence[Played], seeded: bool, step: Step) -> None:
    """Repeated episodes of one instance must read the same."""
    texts = {tuple(seen.text for seen in played.observations) for played in runs}
    if len(texts) > 1:
        first, other = sorted(texts)[:2]
        pairs = zip(first, other, strict=False)
        shown = next(((a, b) for a, b in pairs if a != b), ("", ""))
        step.add(
            "nondeterministic-world",
            "tools/",
            f"the same calls gave {len(texts)} different answers: {shown[0][:80]!r} and "
            f"{shown[1][:80]!r}",
            "error" if seeded else "warning",
        )


def other_process(
    run: Sequence[Observation], texts: Sequence[str], seeded: bool, step: Step
) -> None:
    """``texts``: answers to the same calls in another process, which has another hash seed. What
    ``run`` was cut to is compared as far as it goes."""
    for seen, other in zip(run, texts, strict=False):
        first, second = _TIMES.sub("[time]", _CUT.sub("", seen.text)), _TIMES.sub("[time]", other)
        same = second.startswith(first) if _CUT.search(seen.text) else first == second
        if not same:
            step.add(
                "nondeterministic-world",
                "tools/",
                f"{seen.tool} answers {first[:80]!r} in one process and {second[:80]!r} in "
                "another: the order of a set, hash() or what is kept between episodes; sort what "
                "is a set, and keep nothing in the process",
                "error" if seeded else "warning",
            )
            return
