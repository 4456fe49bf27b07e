"""Result-aware loop detection (facts/sandboxes.md 4.2); pure: no clock, no I/O.

A loop is equal *calls with equal results* while the world stays as it is: calling again is fine
as long as something new comes back.

    detector = LoopDetector({"status": LoopSpec(poll=PollSpec(5, 30))})
    verdict = detector.record("status", {"id": 1}, "running", time_s=12.0, turn=3)

D1 repeat, D2 cycle, D3 jitter, D4 same_error, D6 stagnation and the count of infrastructure errors
are in ``detector.py``, D7 (text without calls) in ``text.py``. D5, calls that cannot be read, needs
no history and is counted where they are refused, in ``sandbox.tool_session``.

A warning is one line for the model, given once a streak; a stop ends the episode. The rollout calls
``repeated_suffix`` on the ids sampled so far (after every piece an engine streams, or after every
step) and ``repeated_turns`` on assistant turns without calls; neither can be seen from the sandbox.
"""

from sandbox.loops.detector import LoopDetector
from sandbox.loops.fingerprint import call_key, is_infra_error, is_no_information, result_key
from sandbox.loops.text import in_code_fence, repeated_suffix, repeated_turns
from sandbox.loops.verdict import STOP_AT, WARN_AT, LoopAction, LoopVerdict

__all__ = [
    "STOP_AT",
    "WARN_AT",
    "LoopAction",
    "LoopDetector",
    "LoopVerdict",
    "call_key",
    "in_code_fence",
    "is_infra_error",
    "is_no_information",
    "repeated_suffix",
    "repeated_turns",
    "result_key",
]
