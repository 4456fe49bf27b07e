"""An order service: GET /orders?customer=&page=, POST /orders/ID/refund. Two orders a page.

python3 -I service.py STATE.json PORT|SOCKET
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PAGE = 2
STATE = Path(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    """State lives in the file, so a restart loses nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path == "/health":
            return self.answer(200, {"ok": True})
        if url.path != "/orders" or "customer" not in query:
            return self.answer(404, {"error": "not found"})
        orders = [order for order in load() if order["customer"] == query["customer"][0]]
        start = PAGE * (int(query.get("page", ["1"])[0]) - 1)
        page = orders[start : start + PAGE]
        return self.answer(200, {"orders": page, "more": start + PAGE < len(orders)})

    def do_POST(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        orders = load()
        found = [order for order in orders if parts[0] == "orders" and order["id"] == parts[1]]
        if len(parts) != 3 or parts[2] != "refund" or not found:
            return self.answer(404, {"error": "no such order"})
        if found[0]["state"] == "refunded":
            return self.answer(409, {"error": "refunded already"})
        found[0]["state"] = "refunded"
        STATE.write_text(json.dumps({"orders": orders}))
        return self.answer(200, {"id": found[0]["id"], "refunded_cents": found[0]["cents"]})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: a box has no terminal."""


def load() -> list:
    return json.loads(STATE.read_text())["orders"]


HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
