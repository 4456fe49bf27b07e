import csv
import json
import os
import sys

from shop.money import read_amount

region = sys.argv[1]
with open("/data/sales.csv", newline="") as file:
    rows = [row for row in csv.DictReader(file) if row["region"] == region]
total = round(sum(read_amount(row["amount"]) for row in rows), 2)
answer = {"region": region, "currency": os.environ["CURRENCY"], "total": total}
print(json.dumps(answer, indent=int(os.environ["INDENT"])))
