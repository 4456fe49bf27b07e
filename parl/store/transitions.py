"""Which state an episode may go to next.

issued -> running -> finished -> scored -> trained
any of the first four -> dropped(reason);  running -> running is a further attempt;
scored -> scored repeats a scoring that was not committed;
finished -> issued only for an episode that the infrastructure failed (reopened).
"""

from __future__ import annotations

from parl.errors import RunError

NEXT: dict[str, frozenset[str]] = {
    "issued": frozenset({"running", "dropped"}),
    "running": frozenset({"running", "finished", "dropped"}),
    "finished": frozenset({"scored", "dropped", "issued"}),
    "scored": frozenset({"scored", "trained", "dropped"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}
TO_RUN = frozenset({"issued", "running"})
"""States of an episode somebody still has to run."""
ENDS = frozenset({"trained", "dropped"})


def check_transition(episode_id: str, state: str, to: str) -> None:
    """RunError unless ``state`` -> ``to`` is legal."""
    if to not in NEXT[state]:
        allowed = ", ".join(sorted(NEXT[state])) or "nothing (it is an end)"
        raise RunError(
            f"episode {episode_id} is {state!r} and cannot become {to!r}; allowed from there: "
            f"{allowed}; `parl rl show {episode_id}` prints its history"
        )
