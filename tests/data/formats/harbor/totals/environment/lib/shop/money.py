"""Amounts as the shop writes them."""

from shop.signs import DECIMAL


def read_amount(text: str) -> float:
    """1.234,50 -> 1234.5"""
    whole, _, part = text.partition(DECIMAL)
    return float(whole.replace(".", "") + "." + (part or "0"))
