"""Statistics of whole numbers."""


def median(values):
    """The middle value; of an even number of values the mean of the two in the middle."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def modes(values):
    """The most frequent values, sorted."""
    counts = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    most = max(counts.values(), default=0)
    return sorted(value for value, count in counts.items() if count == most)


def moving_sum(values, width):
    """Sum of every ``width`` neighbours; one result for each full window."""
    if width < 1:
        raise ValueError("width must be 1 or more")
    sums = []
    for start in range(len(values) - width + 1):
        sums.append(sum(values[start : start + width]))
    return sums


def histogram(values, width):
    """Lower bound of each bin of ``width`` -> number of values in it, as text keys."""
    bins = {}
    for value in sorted(values):
        low = value // width * width
        bins[str(low)] = bins.get(str(low), 0) + 1
    return bins


def longest_rise(values):
    """Length of the longest run in which every value is larger than the one before."""
    best = run = 0
    for index, value in enumerate(values):
        if index > 0 and value > values[index - 1]:
            run += 1
        else:
            run = 1
        best = max(best, run)
    return best
