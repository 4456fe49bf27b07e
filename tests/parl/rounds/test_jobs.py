"""Jobs of a round: how far calls may be mended follows the run, not the episode."""

from __future__ import annotations

import pytest

from parl.config import RunConfig
from parl.rounds.jobs import JobMaker
from sandbox.calls.policy import KeyTier, RepairMode, RepairPolicy
from sandbox.catalog.registry import get_family

TASK = get_family("lookup_calc").instance(1, 0, "train", "add")


def maker(**sandbox: str) -> JobMaker:
    config = RunConfig.model_validate({"sandbox": sandbox, "rounds": {"num_rounds": 9}})
    return JobMaker(config, "r")


def train(jobs: JobMaker, index: int) -> RepairPolicy:
    (group,) = jobs.train_groups(index, [TASK], 0, 0, lambda task: None)
    assert len({job.repair for job in group.jobs}) == 1
    return group.jobs[0].repair


def test_annealing_follows_the_rounds():
    """Typos are mended in the first third, aliases in the second, style in the last."""
    jobs = maker(repairs="anneal")
    tiers = [train(jobs, index).key_tier("read") for index in (0, 2, 3, 5, 6, 8, 100)]
    fuzzy, alias, style = KeyTier.FUZZY, KeyTier.ALIAS, KeyTier.STYLE
    assert tiers == [fuzzy, fuzzy, alias, alias, style, style, style]


@pytest.mark.parametrize("mode", ["off", "strict", "cost"])
def test_an_evaluation_has_its_own_mode(mode: str):
    """Off by default: it shows what the policy itself can do."""
    (group,) = maker(repairs="anneal", eval_repairs=mode).eval_groups("eval:after", [TASK], 3)
    assert group.jobs[0].repair == RepairPolicy(RepairMode(mode))
    (group,) = maker().eval_groups("eval:after", [TASK], 3)
    assert not group.jobs[0].repair.repairs
