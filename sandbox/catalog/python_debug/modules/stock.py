"""A warehouse: batches are [day, quantity], oldest first."""


def on_hand(batches):
    """All pieces."""
    return sum(quantity for _, quantity in batches)


def pick(batches, wanted):
    """[day, quantity] taken for an order, oldest first; ValueError if there is not enough."""
    if wanted > on_hand(batches):
        raise ValueError("not enough stock")
    taken = []
    for day, quantity in sorted(batches):
        if wanted == 0:
            break
        part = min(quantity, wanted)
        if part > 0:
            taken.append([day, part])
            wanted -= part
    return taken


def reorder(stock, minimum, lot):
    """Pieces to order, in whole lots, so that the stock reaches the minimum."""
    missing = minimum - stock
    if missing <= 0:
        return 0
    lots = (missing + lot - 1) // lot
    return lots * lot


def expired(batches, today, shelf_days):
    """Batches that are older than ``shelf_days`` today."""
    return [[day, quantity] for day, quantity in batches if today - day > shelf_days]


def rank(sales):
    """Names by pieces sold, most first; equal numbers by name."""
    return [name for name, _ in sorted(sales.items(), key=lambda item: (-item[1], item[0]))]
