"""The prompts of a round are a pure function of (seed, round, position)."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import ConfigError
from parl.rounds.tasks import TaskSource, interleave, quotas
from sandbox.catalog.registry import get_family

FAMILY = get_family("lookup_calc")
MIX = {"lookup": 0.5, "add": 0.5}
SHARES = st.dictionaries(
    st.sampled_from("abcdef"), st.floats(0, 10) | st.integers(0, 3), min_size=1
).filter(lambda mix: sum(mix.values()) > 1e-3)


def source(seed: int = 3, num_prompts: int = 6, **kwargs) -> TaskSource:
    return TaskSource(FAMILY, kwargs.pop("mix", MIX), seed, num_prompts, **kwargs)


@given(SHARES, st.integers(0, 200))
def test_quotas_are_within_one_of_the_exact_shares(mix: dict[str, float], count: int):
    """Largest remainder: they add up, and a type without a share gets nothing."""
    result = quotas(mix, count)
    total = sum(mix.values())
    assert sum(result.values()) == count and list(result) == list(mix)
    for name, share in mix.items():
        assert abs(result[name] - share / total * count) < 1 + 1e-9
        assert share > 0 or result[name] == 0


def test_a_tie_goes_to_the_type_named_first():
    """The config's order decides, not the alphabet."""
    assert quotas({"b": 1, "a": 1}, 3) == {"b": 2, "a": 1}


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1))
def test_interleaved_prefixes_have_the_mix_of_the_whole(counts: dict[str, int]):
    """In the first k of n, each type is off k * share by less than the number of types."""
    order = interleave(counts)
    assert Counter(order) == Counter({name: n for name, n in counts.items() if n})
    for name, n in counts.items():
        for k in range(len(order) + 1):
            assert (
                abs(order[:k].count(name) - n * k / len(order or "x")) < len(counts) + 1e-9
                or len(counts) == 1
            )


def test_two_equal_types_take_turns():
    """The usual mix of the demo."""
    assert interleave({"a": 3, "b": 3}) == ["a", "b", "a", "b", "a", "b"]


@given(st.permutations(range(5)))
@settings(max_examples=10)
def test_a_round_does_not_depend_on_what_was_drawn_before(order: list[int]):
    """The cursor is the round index: rounds may be drawn in any order, by anybody."""
    tasks = source()
    drawn = {index: tasks.train(index) for index in order}
    assert all(drawn[index] == source().train(index) for index in order)


def test_rounds_share_no_instance_and_follow_the_mix():
    """Round r takes positions [r * num_prompts, (r + 1) * num_prompts)."""
    rounds = [source(mix={"lookup": 2, "add": 1}).train(index) for index in range(8)]
    assert all(Counter(t.task_type for t in tasks) == {"lookup": 4, "add": 2} for tasks in rounds)
    names = [task.name for tasks in rounds for task in tasks]
    assert len(set(names)) == len(names) == 48


def test_heldout_instances_are_the_same_every_time_and_never_trained_on():
    """Neither as an instance nor as what is asked (type, keys and their values)."""
    tasks = source()
    heldout = tasks.heldout(64)
    assert heldout == source().heldout(64) and len(heldout) == 64
    trained = [task for index in range(30) for task in tasks.train(index)]
    trained += tasks.demonstrations(64)

    def asked(task) -> tuple:
        keys = task.instruction.split()[1:]
        store = task.environment.data["store"]
        return task.task_type, *keys, *(store[key] for key in keys)

    assert not {asked(task) for task in heldout} & {asked(task) for task in trained}
    assert not {task.name for task in heldout} & {task.name for task in trained}


@pytest.mark.parametrize("count", [1, 7, 1024, 1_000_001])
def test_demonstrations_come_from_where_no_round_reaches(count: int):
    """Even when there are more of them than their usual start."""
    drawn: list[int] = []

    class Enough(Exception):
        """Three instances say where the sequence begins."""

    class Recorder:
        task_types = FAMILY.task_types

        def instance(self, seed, index, split, task_type):
            if len(drawn) == 3:
                raise Enough
            drawn.append(index)
            return FAMILY.instance(seed, index, split, task_type)

    recorder = TaskSource(Recorder(), MIX, 3, 6)
    with pytest.raises(Enough) if count > 3 else nullcontext():
        recorder.demonstrations(count)
    assert min(drawn) >= 900_000


def test_min_tokens_replace_the_authors_estimate():
    """They depend on the run's tokenizer."""
    estimates = {t.task_type: t.min_tokens for t in source(min_tokens={"add": 41}).train(0)}
    assert estimates == {"add": 41, "lookup": FAMILY.instance(3, 0, "train", "lookup").min_tokens}


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"lookup": 1, "fly": 1}, "names fly, which this family does not have.*lookup, add"),
        ({"lookup": 0.0}, "expected shares >= 0, one of them > 0"),
        ({"lookup": 1, "add": -1}, "expected shares >= 0"),
        ({}, "expected shares >= 0"),
    ],
)
def test_a_mix_that_cannot_be_drawn_is_refused(mix: dict[str, float], message: str):
    """ConfigError before anything starts."""
    with pytest.raises(ConfigError, match=message):
        source(mix=mix)
