"""Amounts as whole cents."""


def parse(text):
    """Cents of "12.34", "-0.50" or "7"; ValueError for anything else."""
    sign = 1
    if text.startswith("-"):
        sign = -1
        text = text[1:]
    whole, point, rest = text.partition(".")
    if not whole.isdigit() or (point and (len(rest) != 2 or not rest.isdigit())):
        raise ValueError("not an amount")
    return sign * (int(whole) * 100 + int(rest or 0))


def show(cents):
    """ "1,234.50" for 123450; a minus in front of negative amounts."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{rest:02d}"


def split(cents, count):
    """``count`` shares that add up to ``cents``; the first ones take the odd cents."""
    if count < 1:
        raise ValueError("count must be 1 or more")
    share, odd = divmod(cents, count)
    return [share + 1 if index < odd else share for index in range(count)]


def discount(cents, percent):
    """Amount after ``percent`` off, rounded to the nearest cent, half a cent up."""
    if not 0 <= percent <= 100:
        raise ValueError("percent must be 0 to 100")
    return (cents * (100 - percent) + 50) // 100


def change(cents, coins):
    """Number of coins of each kind, largest first, that make ``cents``; ValueError if none do."""
    used = {}
    for coin in sorted(coins, reverse=True):
        number = cents // coin
        if number > 0:
            used[str(coin)] = number
            cents -= number * coin
    if cents != 0:
        raise ValueError("no exact change")
    return used
