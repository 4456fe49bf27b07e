"""The weather service: HTTP/1.1 over a Unix socket, with the faults of real APIs.

    python3 -I -S -B -c SOURCE SOCKET WORLD

WORLD is a JSON file: ``stations`` (id -> region, name, keys, unit, readings by date), ``page_size``
and ``faults`` (path -> what its first answers are instead: "429", "500", "503", "slow"). A 429
names a time to wait, and an earlier call is refused again. How many faults a path has had is kept
in a file, so that a service that is started again goes on. It ends when its socket is removed.
"""

import json
import os
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

RETRY_AFTER_S = 1
SLOW_S = 1.5
DOCS = {
    "GET /v2/docs": "this page",
    "GET /v2/stations?region=REGION&page=1": "ids of a region's stations, in pages",
    "GET /v2/stations/ID/readings?date=YYYY-MM-DD": "the reading of one station on one day",
    "limits": "429 and 503 name the seconds to wait in Retry-After",
}


class World:
    """What the service knows, and the faults that are still to come."""

    def __init__(self, path: Path) -> None:
        self.data = json.loads(path.read_text(encoding="utf-8"))
        self.progress_file = path.with_name("service.json")
        self.progress = {"faults": {}, "not_before": {}}
        if self.progress_file.exists():
            self.progress = json.loads(self.progress_file.read_text(encoding="utf-8"))
        self.lock = threading.Lock()

    def fault(self, path: str) -> str | None:
        """The fault this call meets; None for a good answer."""
        with self.lock:
            done = self.progress["faults"].get(path, 0)
            planned = self.data["faults"].get(path, [])
            if time.time() < self.progress["not_before"].get(path, 0):
                return "429"
            if done >= len(planned):
                return None
            self.progress["faults"][path] = done + 1
            if planned[done] == "429":
                self.progress["not_before"][path] = time.time() + RETRY_AFTER_S
            replacement = self.progress_file.with_suffix(".new")
            replacement.write_text(json.dumps(self.progress), encoding="utf-8")
            replacement.replace(self.progress_file)
            return planned[done]


class Handler(BaseHTTPRequestHandler):
    """One connection; ``server.world`` is shared."""

    protocol_version = "HTTP/1.1"
    server_version = "weather/2.3"
    sys_version = ""
    timeout = 30
    server: "Server"

    def do_GET(self) -> None:
        """Faults first, as a gateway in front of the service would."""
        split = urlsplit(self.path)
        path = unquote(split.path)
        fault = self.server.world.fault(path)
        if fault == "slow":
            time.sleep(SLOW_S)
        elif fault == "429":
            return self.answer(429, {"error": "too many requests"}, retry=True)
        elif fault == "503":
            return self.answer(503, {"error": "upstream is restarting"}, retry=True)
        elif fault is not None:
            return self.answer(500, {"error": "internal error", "request_id": "n/a"})
        query = {key: values[-1] for key, values in parse_qs(split.query).items()}
        return self.answer(*self.route(path.strip("/").split("/"), query))

    def route(self, parts: list[str], query: dict[str, str]) -> tuple[int, object]:
        """Status and body."""
        data = self.server.world.data
        match parts:
            case ["v2", "docs"]:
                return 200, DOCS
            case ["v1", *_]:
                return 410, {"error": "version 1 is gone; see /v2/docs"}
            case ["v2", "stations"]:
                return self.stations(data, query)
            case ["v2", "stations", station_id, "readings"]:
                return self.reading(data, station_id, query)
        return 404, {"error": f"no route {self.path.split('?')[0]}; see /v2/docs"}

    @staticmethod
    def stations(data: dict, query: dict[str, str]) -> tuple[int, object]:
        """A page of a region's stations."""
        if "region" not in query:
            return 400, {"error": "the parameter region is missing"}
        found = [
            {"id": key, "name": station["name"]}
            for key, station in data["stations"].items()
            if station["region"] == query["region"]
        ]
        if not found:
            return 404, {"error": f"no region {query['region']!r}", "regions": data["regions"]}
        page = query.get("page", "1")
        size = data["page_size"]
        last = -(-len(found) // size)
        if not page.isascii() or not page.isdigit() or not 1 <= int(page) <= last:
            return 400, {"error": f"page must be a number from 1 to {last}"}
        number = int(page)
        items = found[(number - 1) * size : number * size]
        return 200, {"items": items, "next_page": number + 1 if number < last else None}

    @staticmethod
    def reading(data: dict, station_id: str, query: dict[str, str]) -> tuple[int, object]:
        """One day's reading under the station's own key names."""
        station = data["stations"].get(station_id)
        if station is None:
            return 404, {"error": f"no station {station_id!r}"}
        date = query.get("date", "")
        if date not in station["readings"]:
            known = sorted(station["readings"])
            return 400, {"error": f"date {date!r}: expected YYYY-MM-DD, {known[0]} to {known[-1]}"}
        keys = station["keys"]
        temperature, humidity = station["readings"][date]
        body = {
            keys["name"]: station["name"],
            keys["date"]: date,
            keys["temperature"]: temperature,
            keys["unit"]: station["unit"],
            keys["humidity"]: humidity,
        }
        return 200, {keys["envelope"]: body} if keys["envelope"] else body

    def answer(self, status: int, body: object, retry: bool = False) -> None:
        """JSON with its length; ``retry`` adds Retry-After."""
        content = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if retry:
            self.send_header("Retry-After", str(RETRY_AFTER_S))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        """A Unix socket has no address."""
        return "unix"

    def log_message(self, *_args: object) -> None:
        """Nobody reads a log here."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Ends by itself when the socket's file is gone."""

    daemon_threads = True

    def __init__(self, path: str, world: World) -> None:
        self.world = world
        super().__init__(path, Handler)

    def service_actions(self) -> None:
        """Called every half second."""
        if not Path(str(self.server_address)).exists():
            os._exit(0)


if __name__ == "__main__":
    Server(sys.argv[1], World(Path(sys.argv[2]))).serve_forever()
