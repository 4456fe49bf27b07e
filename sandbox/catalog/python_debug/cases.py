"""Calls of the modules' functions, the even ones shown to the agent as tests.

What a call must answer is computed with the correct module (``expected`` in family.py).
"""

from __future__ import annotations

from typing import Any

Case = tuple[str, list[Any]]
"""Function and arguments (JSON)."""

_GRAPH = {"a": {"b": 4, "c": 1}, "c": {"b": 2, "d": 7}, "b": {"d": 1}, "d": {}, "e": {"a": 1}}
_EQUAL = {"s": {"x": 1, "w": 1}, "x": {"t": 1}, "w": {"t": 1}}
_ENTRIES = [["ann", "bo", 30], ["bo", "cy", 10], ["cy", "ann", 5], ["ann", "cy", 20]]

CASES: dict[str, list[Case]] = {
    "intervals": [
        ("merge", [[[5, 8], [1, 3], [2, 4]]]), ("merge", [[[1, 2], [2, 3], [4, 5]]]),
        ("merge", [[[1, 10], [2, 3]]]), ("merge", [[[3, 1]]]), ("merge", [[[4, 4], [6, 9]]]),
        ("merge", [[]]), ("total_length", [[[0, 4], [2, 6], [10, 11]]]),
        ("total_length", [[[5, 5]]]), ("total_length", [[[1, 3], [3, 7]]]),
        ("gaps", [[[2, 4], [6, 7]], 0, 10]), ("gaps", [[[0, 3], [5, 9]], 0, 9]),
        ("gaps", [[[12, 15]], 3, 10]), ("gaps", [[[0, 3], [8, 20]], 1, 9]),
        ("gaps", [[], 2, 5]), ("find", [[[1, 3], [5, 8]], 5]), ("find", [[[1, 3], [5, 8]], 3]),
        ("find", [[[1, 3], [5, 8]], 7]), ("find", [[[1, 3], [5, 8]], 1]),
        ("find", [[[1, 3], [5, 8]], 8]),
    ],
    "wording": [
        ("wrap", ["one two three four", 9]), ("wrap", ["a bb ccc dddd", 6]),
        ("wrap", ["extraordinary words", 5]), ("wrap", ["", 5]), ("wrap", ["to be or not", 5]),
        ("truncate", ["hello world", 8]), ("truncate", ["hello", 5]), ("truncate", ["abc", 2]),
        ("truncate", ["abcdef", 3]), ("truncate", ["abcd", 3]), ("slug", ["Hello, World!"]),
        ("slug", ["  a  b2 "]), ("slug", ["Q3 -- Report (final)"]), ("slug", ["!!!"]),
        ("columns", [[["a", "bb"], ["ccc", "d"]]]), ("columns", [[]]),
        ("columns", [[["x", "y", "z"], ["long", "", "end"]]]), ("columns", [[["one"]]]),
    ],
    "money": [
        ("parse", ["12.34"]), ("parse", ["-0.50"]), ("parse", ["7"]), ("parse", ["1.5"]),
        ("parse", ["x"]), ("parse", ["3.a0"]), ("parse", ["0.07"]), ("show", [123450]),
        ("show", [-5]), ("show", [0]), ("show", [-100000]), ("split", [100, 3]), ("split", [7, 7]),
        ("split", [11, 4]), ("split", [5, 0]), ("split", [9, 1]), ("discount", [999, 10]),
        ("discount", [150, 33]), ("discount", [200, 100]), ("discount", [200, 101]),
        ("discount", [50, 1]), ("discount", [80, -1]), ("discount", [70, 0]),
        ("change", [88, [50, 20, 10, 5, 2, 1]]), ("change", [60, [25, 10]]),
        ("change", [6, [4, 5]]), ("change", [0, [5]]), ("change", [40, [5, 20]]),
    ],
    "days": [
        ("is_leap", [2024]), ("is_leap", [1900]), ("is_leap", [2000]), ("is_leap", [2023]),
        ("month_length", [2023, 2]), ("month_length", [2024, 2]), ("month_length", [2024, 13]),
        ("month_length", [2024, 12]), ("month_length", [2024, 0]), ("month_length", [2021, 1]),
        ("month_length", [2021, 4]), ("day_of_year", [[2024, 3, 1]]),
        ("day_of_year", [[2023, 12, 31]]), ("day_of_year", [[2023, 1, 1]]),
        ("add", [[2024, 2, 28], 2]), ("add", [[2023, 12, 31], 1]), ("add", [[2023, 1, 31], 0]),
        ("add", [[2023, 1, 15], 400]), ("add", [[2024, 1, 30], 31]),
        ("between", [[2024, 1, 1], [2025, 1, 1]]), ("between", [[2023, 5, 2], [2023, 4, 30]]),
        ("between", [[2023, 5, 2], [2023, 5, 2]]), ("between", [[2019, 6, 1], [2022, 3, 5]]),
    ],
    "grid": [
        ("transpose", [[[1, 2, 3], [4, 5, 6]]]), ("rotate", [[[1, 2], [3, 4], [5, 6]]]),
        ("rotate", [[[1, 2], [3, 4]]]), ("multiply", [[[1, 2]], [[3], [4]]]),
        ("multiply", [[[1, 0], [2, 3]], [[4, 5], [6, 7]]]), ("multiply", [[[1]], [[1], [2]]]),
        ("neighbours", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1, 1]),
        ("neighbours", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0, 0]),
        ("neighbours", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, 1]),
        ("neighbours", [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1, 2]),
        ("peaks", [[[1, 5, 1], [2, 1, 6]]]), ("peaks", [[[3, 3], [1, 2]]]), ("peaks", [[[7]]]),
        ("peaks", [[[9, 1, 8], [1, 2, 1], [4, 1, 3]]]),
        ("spiral", [[[1, 2, 3], [8, 9, 4], [7, 6, 5]]]), ("spiral", [[[1, 2, 3, 4]]]),
        ("spiral", [[[1, 2], [4, 3], [6, 5]]]),
    ],
    "ledger": [
        ("balances", [_ENTRIES]), ("balances", [[["a", "b", 0]]]), ("balances", [[]]),
        ("balances", [[["a", "b", 1]]]), ("balances", [[["a", "b", 2], ["b", "a", 2]]]),
        ("running", [10, [5, -20, 1]]), ("running", [0, []]), ("running", [-3, [3, 3]]),
        ("first_overdraft", [10, [-5, -10, -1], 5]), ("first_overdraft", [10, [-5, -10, -1], 6]),
        ("first_overdraft", [0, [-1], 0]), ("first_overdraft", [0, [1, 2], 0]),
        ("first_overdraft", [5, [-5, -1, 9], 0]), ("settle", [_ENTRIES]), ("settle", [[]]),
        ("settle", [[["a", "b", 7], ["c", "b", 2], ["d", "e", 4]]]),
        ("settle", [[["a", "b", 2], ["b", "a", 2]]]), ("settle", [[["z", "a", 3]]]),
    ],
    "stock": [
        ("on_hand", [[[1, 5], [3, 7]]]), ("on_hand", [[]]), ("pick", [[[3, 7], [1, 5]], 6]),
        ("pick", [[[1, 5], [3, 7]], 12]), ("pick", [[[1, 5]], 6]), ("pick", [[[1, 0], [2, 2]], 1]),
        ("pick", [[[2, 4]], 0]), ("pick", [[[1, 5], [2, 5]], 5]), ("reorder", [10, 25, 10]),
        ("reorder", [25, 25, 10]), ("reorder", [0, 20, 10]), ("reorder", [30, 25, 10]),
        ("reorder", [24, 25, 6]), ("expired", [[[1, 5], [4, 2]], 11, 7]),
        ("expired", [[[1, 5], [3, 2]], 11, 8]), ("expired", [[], 3, 1]),
        ("rank", [{"nut": 3, "bolt": 9, "gear": 3}]), ("rank", [{}]),
        ("rank", [{"b": 1, "a": 1, "c": 2}]),
    ],
    "numerals": [
        ("to_roman", [1994]), ("to_roman", [3999]), ("to_roman", [0]), ("to_roman", [4]),
        ("to_roman", [4000]), ("to_roman", [1]), ("from_roman", ["MCMXCIV"]),
        ("from_roman", ["XIV"]), ("from_roman", ["CDXLIX"]), ("from_roman", ["II"]),
        ("to_base", [255, 16]), ("to_base", [0, 2]), ("to_base", [-10, 2]), ("to_base", [5, 1]),
        ("to_base", [35, 36]), ("to_base", [36, 36]), ("to_base", [7, 37]), ("to_base", [8, 2]),
        ("checksum_ok", ["79927398713"]), ("checksum_ok", ["79927398710"]),
        ("checksum_ok", ["0"]), ("checksum_ok", ["18"]), ("checksum_ok", ["59"]),
        ("checksum_ok", ["4539578763621486"]),
    ],
    "routes": [
        ("shortest", [_GRAPH, "a", "d"]), ("shortest", [_GRAPH, "a", "b"]),
        ("shortest", [_GRAPH, "d", "a"]), ("shortest", [_GRAPH, "e", "d"]),
        ("shortest", [_EQUAL, "s", "t"]), ("shortest", [_GRAPH, "a", "a"]),
        ("reachable", [_GRAPH, "a", 1]), ("reachable", [_GRAPH, "e", 2]),
        ("reachable", [_GRAPH, "d", 3]), ("reachable", [_GRAPH, "e", 0]),
        ("reachable", [_GRAPH, "e", 3]), ("order", [_GRAPH]),
        ("order", [{"a": {"b": 1}, "b": {"a": 1}}]), ("order", [{"z": {}, "y": {"z": 1}, "x": {}}]),
        ("order", [{}]), ("order", [{"m": {"k": 1, "l": 1}, "k": {"l": 1}}]),
    ],
    "figures": [
        ("median", [[3, 1, 2]]), ("median", [[4, 1, 3, 2]]), ("median", [[]]), ("median", [[7]]),
        ("median", [[9, 2]]), ("modes", [[1, 2, 2, 3, 3]]), ("modes", [[]]), ("modes", [[5, 5, 1]]),
        ("modes", [[4]]), ("moving_sum", [[1, 2, 3, 4], 2]), ("moving_sum", [[1, 2], 3]),
        ("moving_sum", [[1, 2, 3], 3]), ("moving_sum", [[1], 0]), ("moving_sum", [[4, 5], 1]),
        ("histogram", [[1, 5, 11, 12, 25], 10]), ("histogram", [[-1, 0, 9], 5]),
        ("histogram", [[], 3]), ("longest_rise", [[1, 2, 2, 3, 4, 5, 1]]), ("longest_rise", [[]]),
        ("longest_rise", [[3, 2, 1]]), ("longest_rise", [[1, 2]]), ("longest_rise", [[5, 6, 7, 1]]),
    ],
    "formula": [
        ("tokens", ["12+(3*4)"]), ("tokens", ["7 8"]), ("tokens", ["2^3"]), ("tokens", [""]),
        ("postfix", ["1+2*3"]), ("postfix", ["(1+2)*3"]), ("postfix", ["1)"]),
        ("postfix", ["8/4/2"]), ("postfix", ["1-2-3+4"]), ("value", ["1+2*3"]),
        ("value", ["(1+2)*3"]), ("value", ["20-5-3"]), ("value", ["100/7/2"]),
        ("value", ["2*(3+4)-6/2"]), ("value", ["((5))"]), ("value", ["7-2*(6-4)"]),
    ],
}  # fmt: skip
