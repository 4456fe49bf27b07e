"""Weight versions: what is published comes back bit for bit, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import WeightsError
from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set
from parl.weights.store import MANIFEST, TENSORS, WeightStore


def make_weights(version: int, value: float = 0.5) -> WeightSet:
    tensors = {
        "embed": np.full((3, 2), value, np.float32),
        "router.bias": np.array([version, -0.0], np.float32),
    }
    return make_weight_set(version, tensors, {"hidden_size": 2})


def assert_same(a: WeightSet, b: WeightSet) -> None:
    assert a.manifest == b.manifest and set(a.tensors) == set(b.tensors)
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert tensor.tobytes() == other.tobytes()


def test_a_published_version_is_served_by_a_new_store(tmp_path: Path):
    """From disk, verified; None means the latest."""
    store = WeightStore(tmp_path / "weights")
    assert store.latest() is None
    folder = store.publish(make_weights(0))
    store.publish(make_weights(1))
    assert folder == tmp_path / "weights" / "v00000" and folder.is_dir()
    other = WeightStore(tmp_path / "weights")
    assert_same(other.fetch(), make_weights(1))
    assert_same(other.fetch(0), make_weights(0))
    assert store.fetch(1) is store.fetch(1), "the newest versions stay in memory"
    assert (other.latest(), other.versions()) == (1, [0, 1])


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        hnp.arrays(
            st.sampled_from([np.float32, np.int64, np.uint8, np.float16]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        ),
        max_size=4,
    )
)
def test_any_tensors_come_back_bit_for_bit(tmp_path_factory, tensors):
    """Empty and zero-dimensional ones, NaN and transposed ones included."""
    root = tmp_path_factory.mktemp("weights")
    weights = make_weight_set(3, {n: t.T for n, t in tensors.items()}, {})
    WeightStore(root).publish(weights)
    assert_same(WeightStore(root).fetch(3), weights)


def test_only_the_newest_versions_stay(tmp_path: Path):
    """On disk and in memory."""
    store = WeightStore(tmp_path, keep_on_disk=2, keep_in_memory=1)
    for version in range(4):
        store.publish(make_weights(version))
    assert store.versions() == [2, 3]
    with pytest.raises(WeightsError, match=r"version 0 is not in .* \(versions there: 2, 3\)"):
        store.fetch(0)


def test_publishing_again_changes_nothing(tmp_path: Path):
    """A resumed run publishes what is there already."""
    store = WeightStore(tmp_path)
    folder = store.publish(make_weights(0))
    before = (folder / TENSORS).stat().st_mtime_ns
    WeightStore(tmp_path).publish(make_weights(0))
    assert (folder / TENSORS).stat().st_mtime_ns == before


def test_leftovers_of_a_crash_give_way(tmp_path: Path):
    """Versions after the published one, and another content of the same one, were not committed."""
    store = WeightStore(tmp_path)
    for version in range(3):
        store.publish(make_weights(version))
    resumed = WeightStore(tmp_path)
    resumed.publish(make_weights(1, value=0.25))
    assert resumed.versions() == [0, 1]
    assert_same(WeightStore(tmp_path).fetch(), make_weights(1, value=0.25))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / TENSORS).write_bytes(b"x" * 100), "cannot be read"),
        (lambda f: (f / TENSORS).unlink(), "cannot be read"),
        (lambda f: (f / MANIFEST).write_text("{}"), "is not a weight manifest"),
        (lambda f: (f / MANIFEST).unlink(), "is not a weight manifest"),
        (lambda f: _flip_last_bit(f / TENSORS), "does not match its sha256"),
        (lambda f: _set_version(f / MANIFEST, 9), "says version 9, its folder 0"),
    ],
)
def test_damage_is_found_and_said_in_one_line(tmp_path: Path, damage, message: str):
    """Whatever happened to the files, no engine gets them."""
    folder = WeightStore(tmp_path).publish(make_weights(0))
    damage(folder)
    with pytest.raises(WeightsError, match=message) as error:
        WeightStore(tmp_path).fetch(0)
    assert "\n" not in str(error.value)


def _flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _set_version(path: Path, version: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))


def test_what_does_not_match_its_manifest_is_not_published(tmp_path: Path):
    """The learner's mistake is found before any engine is asked."""
    weights = make_weights(0)
    weights.tensors["embed"][0, 0] = 7.0
    store = WeightStore(tmp_path)
    with pytest.raises(WeightsError, match="tensor embed does not match"):
        store.publish(weights)
    assert store.versions() == []


def test_a_half_written_version_is_not_seen_and_goes_away(tmp_path: Path):
    """A crash before the rename leaves a temporary folder, which nobody serves."""
    store = WeightStore(tmp_path)
    store.publish(make_weights(0))
    leftover = tmp_path / ".tmp-v00001-123"
    leftover.mkdir()
    assert store.versions() == [0] and store.latest() == 0
    WeightStore(tmp_path)
    assert leftover.exists(), "another process may be writing it"
    os.utime(leftover, (0, 0))
    WeightStore(tmp_path)
    assert not leftover.exists()


def test_a_failed_write_is_said_in_one_line(tmp_path: Path):
    """Disk full, read-only, a file in the way: WeightsError and nothing half published."""
    store = WeightStore(tmp_path)
    (tmp_path / f".tmp-v00000-{os.getpid()}").write_text("in the way")
    with pytest.raises(WeightsError, match="version 0 cannot be written") as error:
        store.publish(make_weights(0))
    assert "\n" not in str(error.value) and store.versions() == []
