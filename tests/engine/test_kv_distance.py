"""Facts far back, through LightEngine: engine.bench.kv_fact --tokens at a short length."""

from pathlib import Path

import pytest

from engine.bench.kv_distance import report, tell
from engine.bench.kv_recall import small_attention

POSITIONS = [100, 260, 420, 900]


@pytest.mark.slow
def test_a_cold_fact_is_found_after_the_re_warm_only(tmp_path: Path):
    """At three lengths of one growing context; answers keep their length, and ten rounds of
    evict_kv and rewarm_kv change no digit (at most 0.9 % is allowed)."""
    story = tell(
        [1000, 1300, 1600],
        POSITIONS,
        warm=256,
        directory=tmp_path,
        attention=small_attention(),
    )
    for at in story.lengths:
        cold = [said for said in at.cold if said is not None]
        assert len(cold) >= 3 and not any(said.is_right for said in cold)
        assert all(said.is_right for said in at.warm)
        assert at.account.num_cold > 0 and at.account.cold_bytes > 0
    assert story.lengths[0].cold[3] is None, "the newest fact is warm at first"
    counts = [[said.count for said in at.warm] for at in story.lengths]
    assert counts == [[len(fact.answer) for fact in story.text.facts]] * 3
    # 3 + 4 + 5 numbers of three digits, ten times
    assert (story.numbers, story.wrong) == (360, 0)
    lines = "\n".join(report(story))
    assert "the same answer by answer" in lines and "0 of 360" in lines
