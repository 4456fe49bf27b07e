"""Cold records: what is read is what was written, or an error says so; and names of prefixes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BlockCorrupt, CapacityError, EngineError
from engine.kvcache.layout import HEADER_BYTES, PAGE
from engine.kvcache.prefix import model_hash, prefix_key, prefix_keys
from engine.kvcache.record_store import SEGMENT_RECORDS, RecordStore
from engine.kvcache.records import Header, read_record, write_record

MODEL = model_hash("tiny")
HEADER = Header(MODEL, block_id=7, position=3, serial=9)


def payload(seed: int, size: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@given(st.integers(0, PAGE - 1), st.integers(1, 255), st.integers(0, 2**20))
def test_a_flipped_byte_is_found(place: int, mask: int, seed: int):
    """Any byte of header or payload; bytes of the padding are nobody's."""
    record, data = np.empty(PAGE, np.uint8), payload(seed)
    write_record(record, HEADER, data)
    assert np.array_equal(read_record(record, HEADER, "here"), data)
    record[place] ^= mask
    is_padding = 76 <= place < HEADER_BYTES or place >= HEADER_BYTES + len(data)
    if is_padding:
        assert np.array_equal(read_record(record, HEADER, "here"), data)
    else:
        with pytest.raises(BlockCorrupt, match="prefill") as caught:
            read_record(record, HEADER, "here")
        assert isinstance(caught.value, EngineError) and isinstance(caught.value, OSError)


@pytest.mark.parametrize(
    "other",
    [
        replace(HEADER, model=model_hash("other")),
        replace(HEADER, block_id=8),
        replace(HEADER, position=4),
        replace(HEADER, serial=10),
    ],
)
def test_an_intact_record_of_something_else_is_refused(other: Header):
    """A good checksum is not enough: model, block, position and serial must agree."""
    record = np.empty(PAGE, np.uint8)
    write_record(record, other, payload(0))
    with pytest.raises(BlockCorrupt, match="block 3"):
        read_record(record, HEADER, "here")


def test_records_move_to_the_file_when_host_memory_is_full(tmp_path: Path):
    """Two fit in host memory, the longest stay moves down; all come back to the bit, places are
    used again, and the file has no name that a crash could leave behind."""
    store = RecordStore(MODEL, PAGE, host_bytes=2 * PAGE, directory=tmp_path)
    serials = [store.put(i, i, payload(i)) for i in range(SEGMENT_RECORDS + 5)]
    assert store.host_bytes == 2 * PAGE
    assert store.disk_bytes == (len(serials) - 2) * PAGE
    assert [store.is_on_disk(s) for s in serials[-3:]] == [True, False, False]
    for i, serial in enumerate(serials):
        assert np.array_equal(store.load(serial), payload(i))
    store.free(serials[0])
    store.free(serials[-1])
    again = store.put(99, 99, payload(99))
    assert np.array_equal(store.load(again), payload(99))
    assert not list(tmp_path.iterdir())
    store.close()


def test_without_a_folder_a_full_host_refuses():
    """The message names the limit; nothing that was there is lost."""
    store = RecordStore(MODEL, PAGE, host_bytes=PAGE + 1, directory=None)
    serial = store.put(0, 0, payload(0))
    with pytest.raises(CapacityError, match=f"host_bytes={PAGE + 1}"):
        store.put(1, 1, payload(1))
    assert np.array_equal(store.load(serial), payload(0))


@pytest.mark.parametrize("on_disk", [False, True])
def test_rot_in_either_part_is_found(on_disk: bool, tmp_path: Path):
    """One bit of the stored bytes."""
    store = RecordStore(MODEL, PAGE, 0 if on_disk else PAGE, tmp_path)
    serial = store.put(0, 0, payload(0))
    assert store.is_on_disk(serial) == on_disk
    store.record(serial)[HEADER_BYTES + 100] ^= 1
    with pytest.raises(BlockCorrupt, match="file" if on_disk else "host memory"):
        store.load(serial)
    store.close()


def test_prefix_keys_are_the_same_in_another_process():
    """Whatever PYTHONHASHSEED is; and they chain: a change early changes all that follow."""
    ids = list(range(100))
    code = "from engine.kvcache.prefix import prefix_keys as p\n" + (
        "print(p('m', list(range(100)))[-1].hex())"
    )
    env = os.environ | {"PYTHONHASHSEED": "123"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    keys = prefix_keys("m", ids)
    assert len(keys) == 3 and run.stdout.strip() == keys[-1].hex()
    changed = prefix_keys("m", [1, *ids[1:]])
    assert not set(keys) & set(changed) and not set(keys) & set(prefix_keys("n", ids))
    assert keys[1] == prefix_key("m", keys[0], ids[32:64])
    assert prefix_key("m", b"", [1]) != prefix_key("m", b"\1", [1])
