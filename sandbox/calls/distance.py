"""Optimal string alignment distance: edits and swaps of neighbours, within a bound."""

from __future__ import annotations


def osa_within(a: str, b: str, limit: int) -> int | None:
    """Distance of ``a`` and ``b`` if it is at most ``limit``, else None.

    O(limit * length): only a band around the diagonal is filled in, and reading stops as soon as
    a row and the one before are past the limit.
    """
    if abs(len(a) - len(b)) > limit:
        return None
    far = limit + 1
    before: list[int] = []
    row = [j if j <= limit else far for j in range(len(b) + 1)]
    for i, char in enumerate(a, 1):
        low, high = max(1, i - limit), min(len(b), i + limit)
        current = [far] * (len(b) + 1)
        current[0] = min(i, far)
        for j in range(low, high + 1):
            cost = min(row[j] + 1, current[j - 1] + 1, row[j - 1] + (char != b[j - 1]))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == b[j - 1]:
                cost = min(cost, before[j - 2] + 1)
            current[j] = min(cost, far)
        if min(current) > limit and min(row) > limit:
            return None
        before, row = row, current
    return row[-1] if row[-1] <= limit else None
