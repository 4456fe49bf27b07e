"""The benches of the parser run, and the rates they print hold on a small registry."""

import json

from sandbox.bench.key_rates import load_tools, rates
from sandbox.bench.parse import CASES, parse_ms, record_us


def test_every_kind_of_argument_is_timed():
    """64 KiB of each, checked to be repaired or not as it says."""
    for case in CASES:
        assert 0 < parse_ms(case, 1 << 16, rounds=1) < 5000
    assert 0 < record_us(30, rounds=1) < 5000


def test_rates(tmp_path):
    """Styles are always right; no unrelated name and hardly a typo goes wrong."""
    named = [("weather", ["city", "start_date", "units"]), ("mail", ["recipient", "subject"]),
             ("shop", ["min_price", "max_price", "currency"]), ("files", ["path", "encoding"]),
             ("forms", ["form", "from", "data", "date"])]  # fmt: skip
    rows = [
        {"function": [{"name": n, "parameters": {"properties": dict.fromkeys(keys, 1)}}]}
        for n, keys in named
    ]
    file = tmp_path / "tools.json"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    tools = load_tools([file])
    assert len(tools) == 5
    counts = rates(tools, num_unrelated=20, seed=0)
    wrong = [kind for kind in counts if kind[1] in ("wrong", "typo")]
    assert wrong == [] and counts["style", "none"] == 0
    assert counts["one edit", "right"] > counts["one edit", "none"]
