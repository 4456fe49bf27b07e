"""Entries of a shared account: [payer, receiver, amount]."""


def balances(entries):
    """Name -> what came in minus what went out."""
    result = {}
    for payer, receiver, amount in entries:
        if amount <= 0:
            raise ValueError("amounts are positive")
        result[payer] = result.get(payer, 0) - amount
        result[receiver] = result.get(receiver, 0) + amount
    return result


def running(start, amounts):
    """The balance after each amount."""
    totals = []
    total = start
    for amount in amounts:
        total += amount
        totals.append(total)
    return totals


def first_overdraft(start, amounts, limit):
    """Index of the first amount after which the balance is below ``-limit``, else -1."""
    for index, total in enumerate(running(start, amounts)):
        if total < -limit:
            return index
    return -1


def settle(entries):
    """Payments [from, to, amount] that bring everybody to zero, by name."""
    owed = balances(entries)
    gives = sorted([name, amount] for name, amount in owed.items() if amount > 0)
    takes = sorted([name, -amount] for name, amount in owed.items() if amount < 0)
    payments = []
    while gives and takes:
        amount = min(gives[0][1], takes[0][1])
        payments.append([gives[0][0], takes[0][0], amount])
        for side in (gives, takes):
            side[0][1] -= amount
            if side[0][1] == 0:
                side.pop(0)
    return payments
