import csv
import os

from shop.money import read_amount


def total(region: str) -> float:
    with open("/data/sales.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["region"] == region]
    return round(sum(read_amount(row["amount"]) for row in rows), int(os.environ["GRADE_DIGITS"]))
