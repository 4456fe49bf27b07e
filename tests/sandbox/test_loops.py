"""D1: a run of equal calls with equal results."""

import pytest

from sandbox.loops import LoopDetector


def strongest(calls: list[tuple[str, dict, str]]) -> list[tuple[int, str]]:
    """(1-based call, action) of every verdict."""
    detector = LoopDetector()
    verdicts = [detector.record(*call) for call in calls]
    return [(i + 1, v.action.value) for i, v in enumerate(verdicts) if v is not None]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("f", {"q": 1}, "x")] * 2, []),
        ([("f", {"q": 1}, "x")] * 4, [(3, "warn")]),
        ([("f", {"q": 1}, "x")] * 5, [(3, "warn"), (5, "stop")]),
        ([("f", {"q": 1}, str(i)) for i in range(9)], []),
        ([("f", {"q": i}, "x") for i in range(9)], []),
        ([("f", {"q": 1}, "x"), ("g", {}, "x")] * 4, []),
        ([("f", {"a": 1, "b": 2.0}, "x"), ("f", {"b": 2, "a": 1}, "x")] * 2, [(3, "warn")]),
        ([("f", {"q": "ａ"}, "x y"), ("f", {"q": "a"}, " x  y\n")] * 2, [(3, "warn")]),
        ([("f", {"q": 1}, "x")] * 3 + [("g", {}, "")] + [("f", {"q": 1}, "x")] * 3,
         [(3, "warn"), (7, "warn")]),
    ],
)  # fmt: skip
def test_repeats_warn_at_three_and_stop_at_five(calls: list, expected: list):
    """Only a trailing run of equal call and equal result counts."""
    assert strongest(calls) == expected
