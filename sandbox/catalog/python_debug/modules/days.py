"""Calendar days as [year, month, day]."""

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year):
    """Every fourth year, of the full centuries every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year, month):
    """Days of a month; ValueError for a month that does not exist."""
    if not 1 <= month <= 12:
        raise ValueError("month must be 1 to 12")
    if month == 2 and is_leap(year):
        return 29
    return LENGTHS[month - 1]


def day_of_year(day):
    """1 for the first of January."""
    year, month, number = day
    return sum(month_length(year, before) for before in range(1, month)) + number


def add(day, count):
    """The day ``count`` days later; ``count`` is not negative."""
    year, month, number = day
    number += count
    while number > month_length(year, month):
        number -= month_length(year, month)
        month += 1
        if month > 12:
            month = 1
            year += 1
    return [year, month, number]


def between(first, last):
    """Days from ``first`` to ``last``; negative if ``last`` comes earlier."""
    if last < first:
        return -between(last, first)
    days = day_of_year(last) - day_of_year(first)
    for year in range(first[0], last[0]):
        days += 366 if is_leap(year) else 365
    return days
