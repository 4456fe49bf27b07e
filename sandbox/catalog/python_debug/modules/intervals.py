"""Half-open intervals [start, end] of whole numbers, each a list of two."""


def merge(intervals):
    """Sorted intervals without overlaps; intervals that touch become one."""
    merged = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError("an interval ends before it starts")
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def total_length(intervals):
    """Length that the intervals cover together; a point that two cover counts once."""
    return sum(end - start for start, end in merge(intervals))


def gaps(intervals, first, last):
    """What the intervals leave free between ``first`` and ``last``."""
    free = []
    position = first
    for start, end in merge(intervals):
        if start > position and position < last:
            free.append([position, min(start, last)])
        position = max(position, end)
    if position < last:
        free.append([position, last])
    return free


def find(intervals, point):
    """Index of the first merged interval that holds ``point`` (its end excluded), else -1."""
    for index, (start, end) in enumerate(merge(intervals)):
        if start <= point < end:
            return index
    return -1
