"""Weight sets: digests that see every bit, name, shape and type."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.runtime.types import WeightSet
from engine.runtime.weights import make_weight_set, tensor_digest, verify_weight_set

TENSORS = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}


def test_a_digest_sees_bits_shape_and_type_not_layout():
    """The same values in another memory layout or byte order are the same tensor."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = [np.asfortranarray(a), a.astype(">f4"), np.repeat(a, 2, axis=0)[::2]]
    assert {tensor_digest(x) for x in same} == {tensor_digest(a)}
    flipped = a.copy()
    flipped.view(np.uint32)[0, 0] ^= 1
    others = [flipped, a.reshape(3, 2), a.astype(np.float64), a.view(np.int32)]
    assert len({tensor_digest(x) for x in [a, *others]}) == 5


def test_the_checksum_names_the_whole_set():
    """Not the order of the tensors or the version."""
    one = make_weight_set(1, TENSORS, {})
    two = make_weight_set(2, dict(reversed(TENSORS.items())), {"x": 1})
    three = make_weight_set(1, {"a": TENSORS["a"], "c": TENSORS["b"]}, {})
    assert one.manifest.checksum == two.manifest.checksum != three.manifest.checksum


def test_a_whole_set_passes():
    verify_weight_set(make_weight_set(1, TENSORS, {}))


@pytest.mark.parametrize("change", ["missing", "unlisted", "bit"])
def test_a_set_that_is_not_what_it_says_is_refused(change: str):
    """WeightsError names the tensor."""
    good = make_weight_set(1, TENSORS, {})
    tensors = {name: tensor.copy() for name, tensor in TENSORS.items()}
    if change == "missing":
        del tensors["b"]
    elif change == "unlisted":
        tensors["b2"] = tensors["b"]
    else:
        tensors["b"].view(np.uint8)[0, 0] ^= 1
    with pytest.raises(WeightsError, match="b"):
        verify_weight_set(WeightSet(good.manifest, tensors))
