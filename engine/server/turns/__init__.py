"""One assistant turn as it is sampled: ids in, deltas out.

An answer that is not streamed is the sum of the same deltas, so both are equal however the tokens
arrive. What a delta said is never taken back; where the finders of engine.chat would (a call whose
end never comes), the answer keeps what was said and ``error`` names what is wrong.
"""

from __future__ import annotations

from engine.chat.chatml import ChatMLRenderer
from engine.chat.dialogue import Renderer
from engine.chat.renderer import KimiRenderer
from engine.errors import NotSupportedError
from engine.server.turns.base import CallDelta, Delta, Turn, TurnDeltas, fold
from engine.server.turns.hermes import HermesTurn
from engine.server.turns.kimi import KimiTurn

__all__ = ["CallDelta", "Delta", "Turn", "TurnDeltas", "fold", "turn_deltas"]


def turn_deltas(
    renderer: Renderer, *, calls: bool, thinking: bool = False, call_prefix: str = "call_"
) -> TurnDeltas:
    """A reader of one turn. ``calls`` False: no tool was declared, or none may be called.
    ``thinking``: the generation header has opened a block of reasoning. ``call_prefix``: ids of
    calls in formats that have none."""
    if isinstance(renderer, KimiRenderer):
        return KimiTurn(renderer.tokenizer, calls=calls, thinking=thinking)
    if isinstance(renderer, ChatMLRenderer):
        return HermesTurn(renderer.tokenizer, calls=calls, call_prefix=call_prefix)
    raise NotSupportedError(f"no reader for the turns of a {type(renderer).__name__}")
