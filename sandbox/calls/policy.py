"""How far a broken call may be repaired: by the run's mode, the tool's effect and the task's cap.

Free repair was measured to stop a policy from unlearning typos (facts/rl-platforms.md 5), so every
repair leaves a tag and the default mode is ``cost``: the reward side charges for the tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from sandbox.tool_spec import Effect, KeyRepair


class KeyTier(IntEnum):
    """How an argument key may be matched; each tier includes those below it."""

    EXACT = 0
    STYLE = 1
    """Letter case, separators, width: ``START-DATE`` for ``start_date``."""
    ALIAS = 2
    """Declared aliases, then the bundled table: ``城市`` for ``city``."""
    FUZZY = 3
    """Typos within the guards of facts/sandboxes.md 3.4."""


class RepairMode(StrEnum):
    """What a run allows.

    ``off``: nothing is repaired, for evaluation of what the policy itself can do. ``strict``: only
    repairs that cannot change what was meant (JSON, names, lossless types, key style). ``cost``:
    keys up to the tier of the tool's effect; the repairs are meant to be charged. ``anneal``: like
    ``cost`` at the start of training, like ``strict`` at its end.
    """

    OFF = "off"
    STRICT = "strict"
    COST = "cost"
    ANNEAL = "anneal"


TIER_OF_EFFECT: dict[Effect, KeyTier] = {
    "read": KeyTier.FUZZY,
    "write": KeyTier.ALIAS,
    "destructive": KeyTier.STYLE,
}
TIER_OF_NAME: dict[KeyRepair, KeyTier] = {
    "off": KeyTier.EXACT,
    "style": KeyTier.STYLE,
    "alias": KeyTier.ALIAS,
    "fuzzy": KeyTier.FUZZY,
}


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    """``progress``: share of training done, in [0, 1]; only ``anneal`` looks at it."""

    mode: RepairMode = RepairMode.COST
    progress: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.progress <= 1.0:
            raise ValueError(
                f"repair progress {self.progress}: expected the share of training done, in [0, 1]"
            )

    @property
    def repairs(self) -> bool:
        """Whether anything at all may be repaired."""
        return self.mode is not RepairMode.OFF

    def key_tier(self, effect: Effect, cap: KeyTier = KeyTier.FUZZY) -> KeyTier:
        """Furthest tier for a tool with ``effect``; ``cap`` is the task's own limit."""
        return min(self.allowance, TIER_OF_EFFECT[effect], cap)

    @property
    def allowance(self) -> KeyTier:
        """Furthest tier of the mode alone. ``anneal`` gives up typos after a third of training and
        aliases after two thirds."""
        if self.mode is RepairMode.OFF:
            return KeyTier.EXACT
        if self.mode is RepairMode.STRICT:
            return KeyTier.STYLE
        if self.mode is RepairMode.COST or self.progress < 1 / 3:
            return KeyTier.FUZZY
        return KeyTier.ALIAS if self.progress < 2 / 3 else KeyTier.STYLE
