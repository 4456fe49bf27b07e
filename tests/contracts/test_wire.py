"""What crosses the wire comes back as it was: values, errors, bodies that are wrong."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from engine import errors
from engine.adapters.service import pack_weights, unpack_weights
from engine.adapters.wire import decode, decode_array, decode_error, encode, encode_error
from engine.errors import EngineError, TryAgainLater, WeightsError
from engine.runtime.types import EngineInfo, EvictResult, StepResult
from engine.runtime.weights import verify_weight_set
from tests.engine.tiny import make_weights

RESULT = StepResult(
    np.array([3, 1], np.int32),
    np.array([-0.5, -np.inf], np.float32),
    "stop",
    7,
    5,
    experts=np.arange(12, dtype=np.int16).reshape(2, 3, 2)[:, ::-1],
    experts_start=4,
    masks=np.array([[255], [1]], np.uint8),
    stop_text="\n",
)


def test_a_result_comes_back():
    """Arrays with dtype, shape and every bit; what was None is None."""
    back = decode(StepResult, encode(RESULT))
    for field in dataclasses.fields(StepResult):
        sent, got = getattr(RESULT, field.name), getattr(back, field.name)
        if isinstance(sent, np.ndarray):
            assert sent.dtype == got.dtype
            np.testing.assert_array_equal(sent, got)
        else:
            assert sent == got


def test_a_big_endian_array_crosses():
    """The wire is little-endian, whatever the array was."""
    sent = np.array([1, 2, 300], ">i4")
    got = decode_array(encode(sent))
    assert got.tolist() == [1, 2, 300] and got.dtype == np.int32


def test_newer_and_older_peers():
    """Fields that this version does not know are skipped; ones with a default may lack."""
    info = EngineInfo("x", "1.1", 3, "", 10, 20, frozenset({"fork", "evict"}))
    assert decode(EngineInfo, encode(info) | {"colour": "red"}) == info
    assert decode(EvictResult, {"evicted": [[0, 32]], "freed_bytes": 1}).evicted == ((0, 32),)
    with pytest.raises(EngineError, match="lacks freed_bytes"):
        decode(EvictResult, {"evicted": []})


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": "|O", "shape": [1], "data": ""},
        {"dtype": "<i4", "shape": [2], "data": "AAAA"},
        {"dtype": "<i4", "shape": [1], "data": "not base64"},
        {"dtype": "nonsense", "shape": [1], "data": ""},
    ],
)
def test_a_bad_array_is_one_clear_line(bad: dict):
    with pytest.raises(EngineError, match="cannot be read"):
        decode_array(bad)


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, EngineError)]
)
def test_every_error_keeps_its_class(kind: type[EngineError]):
    error = kind("what, value; do this", 2.5) if issubclass(kind, TryAgainLater) else kind("why")
    back = decode_error(encode_error(error))
    assert type(back) is kind and str(back) == str(error)
    if isinstance(back, TryAgainLater):
        assert back.retry_after_s == 2.5


def test_a_bug_is_an_engine_error():
    """Nothing but MRI's classes is built on the other side."""
    back = decode_error(encode_error(KeyError("x")))
    assert type(back) is EngineError and "KeyError" in str(back)
    assert type(decode_error({"type": "SystemExit", "message": "no"})) is EngineError


def test_weights_cross_with_their_manifest():
    weights = make_weights(3)
    back = unpack_weights(pack_weights(weights))
    verify_weight_set(back)
    assert back.manifest == weights.manifest


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 64])
def test_bytes_that_are_no_weights(data: bytes):
    with pytest.raises(WeightsError, match="no weight set"):
        unpack_weights(data)
