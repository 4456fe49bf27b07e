"""Parse time and detector cost: ``python -m sandbox.bench.parse``.

Decodes one call of a given size from its text to valid arguments (name, JSON, keys, types, schema):
right as it is, and needing every kind of repair; then the cost of a small call and of one record of
the loop detector. Milliseconds are CPU time (decoding is one thread that waits for nothing), the
best of the rounds; the growth from an eighth of the size shows that time is linear.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandbox.calls.decode import decode
from sandbox.calls.table import ToolTable
from sandbox.calls.types import DecodedCall
from sandbox.loops import LoopDetector
from sandbox.session import RawCall
from sandbox.tool_spec import ToolSpec

_ROW = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = ToolTable(
    [
        ToolSpec(
            "save",
            schema={
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "numbers": {"type": "array", "items": {"type": "number"}},
                    "rows": {"type": "array", "items": _ROW},
                },
            },
        )
    ]
)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of argument; ``text`` gives about ``num_bytes`` of it."""

    name: str
    text: Callable[[int], str]
    repaired: bool


def _filled(head: str, piece: str, tail: str, num_bytes: int) -> str:
    count = (num_bytes - len(head) - len(tail)) // (len(piece) + 1)
    return head + ",".join([piece] * count) + tail


def _case(name: str, head: str, piece: str, tail: str, repaired: bool) -> Case:
    return Case(name, lambda num_bytes: _filled(head, piece, tail, num_bytes), repaired)


CASES = (
    Case("strict, one string", lambda n: json.dumps({"text": "line of code\n" * (n // 14)}), False),
    _case("strict, numbers", '{"numbers":[', "1.25", "]}", False),
    _case("strict, objects", '{"rows":[', '{"city":"Paris","days":3}', "]}", False),
    Case(
        "repaired, one string",
        lambda n: '{"Text":"' + "line of code\n" * ((n - 20) // 13) + '"',
        True,
    ),
    _case("repaired, numbers", '```\n{"numbers":[', "1.25", ",],}\n```", True),
    _case("repaired, objects", '{"Rows":[', '{"city":"Paris","days":3}', ",]", True),
    _case("repaired, every object", '{"rows":[', '{"citty":"a","Days":"3"}', "]", True),
)


def best_ms(run: Callable[[], object], rounds: int) -> float:
    """CPU milliseconds of the fastest of ``rounds`` runs."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return 1e3 * best


def parse_ms(case: Case, num_bytes: int, rounds: int) -> float:
    """Milliseconds to decode one call of about ``num_bytes``; the outcome is checked."""
    raw = RawCall("functions.save:0", case.text(num_bytes))
    found = decode(raw, TOOLS)
    assert isinstance(found, DecodedCall) and bool(found.repairs) == case.repaired, (case, found)
    return best_ms(lambda: decode(raw, TOOLS), rounds)


def record_us(num_calls: int, rounds: int) -> float:
    """Microseconds of one record, over an episode of different searches that find nothing."""
    calls = [({"query": f"ray actors {i}", "limit": i}, "no results") for i in range(num_calls)]

    def run() -> None:
        detector = LoopDetector()
        for arguments, result in calls:
            detector.record("search", arguments, result)

    return 1e3 * best_ms(run, rounds) / num_calls


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_ = sys.stdout.write
    print_(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {platform.machine()}, "
        f"Python {platform.python_version()}, {options.bytes} bytes\n"
    )
    for case in CASES:
        whole = parse_ms(case, options.bytes, options.rounds)
        eighth = parse_ms(case, options.bytes // 8, options.rounds)
        print_(f"{case.name:<26} {whole:8.1f} ms   x{whole / eighth:.1f} for x8 bytes\n")
    for name, text in (
        ("small call, exact keys", '{"text":"a","numbers":[1]}'),
        ("small call, two typos", '{"tetx":"a","numbres":[1]}'),
    ):
        raw = RawCall("functions.save:0", text)
        print_(f"{name:<26} {1e3 * best_ms(lambda r=raw: decode(r, TOOLS), 200):8.1f} us\n")
    print_(f"{'loop detector, one call':<26} {record_us(100, 20):8.1f} us\n")


if __name__ == "__main__":
    main()
