"""Cold records: one block, all layers side by side, with a header that says what it should be.

    0   magic "PARLKV" and two bytes of version        64  payload length   u64
    8   model hash, 32 bytes                           72  crc32            u32
    40  block id     u64                               76  zeros up to 128
    48  position     u64, the block's number           128 payload, then zeros to a whole page
    56  serial       u64

Little-endian. The checksum covers the header before it and the payload. The serial is new for each
record, so a stale record in a place that was used again is found too. Everything is checked when a
record is read: silent garbage from an offloaded cache is a known failure of others
(facts/kv-attention.md 8.9).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from engine.errors import BlockCorrupt
from engine.kvcache.layout import HEADER_BYTES
from engine.kvcache.prefix import LAYOUT_VERSION

MAGIC = b"PARLKV" + LAYOUT_VERSION.to_bytes(2, "little")
_HEAD = struct.Struct("<8s32sQQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """``model``: 32 bytes, see prefix.model_hash; ``position``: the block's number in its
    context."""

    model: bytes
    block_id: int
    position: int
    serial: int


def write_record(record: np.ndarray, header: Header, payload: np.ndarray) -> None:
    """Fill record uint8 [record_bytes] with payload uint8 [n]."""
    head = _HEAD.pack(
        MAGIC, header.model, header.block_id, header.position, header.serial, len(payload)
    )
    crc = zlib.crc32(np.ascontiguousarray(payload).data, zlib.crc32(head))
    record[: _HEAD.size] = np.frombuffer(head, np.uint8)
    record[_HEAD.size : HEADER_BYTES] = 0
    record[_HEAD.size : _HEAD.size + _CRC.size] = np.frombuffer(_CRC.pack(crc), np.uint8)
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    record[HEADER_BYTES + len(payload) :] = 0


def read_record(record: np.ndarray, expected: Header, place: str) -> np.ndarray:
    """The payload, a view. BlockCorrupt when the checksum or a field of the header is wrong."""
    head = record[: _HEAD.size].tobytes()
    magic, model, block_id, position, serial, length = _HEAD.unpack(head)
    if magic != MAGIC or length > len(record) - HEADER_BYTES:
        raise _corrupt(expected, place, f"its header begins with {magic!r}, not {MAGIC!r}")
    payload = record[HEADER_BYTES : HEADER_BYTES + length]
    (crc,) = _CRC.unpack(record[_HEAD.size : _HEAD.size + _CRC.size].tobytes())
    found = zlib.crc32(np.ascontiguousarray(payload).data, zlib.crc32(head))
    if found != crc:
        raise _corrupt(expected, place, f"its crc32 is {found:08x}, not {crc:08x}")
    header = Header(model, block_id, position, serial)
    if header != expected:
        raise _corrupt(expected, place, f"it is {_name(header)}")
    return payload


def _corrupt(expected: Header, place: str, what: str) -> BlockCorrupt:
    return BlockCorrupt(
        f"the cold record in {place} should be {_name(expected)}, but {what}; the block is lost, "
        "prefill its tokens again"
    )


def _name(header: Header) -> str:
    return (
        f"block {header.position} (id {header.block_id}, record {header.serial}, model "
        f"{header.model[:4].hex()})"
    )
