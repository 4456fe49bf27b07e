"""A real HTTP API for the proxy's tests: good answers, bad answers, lost answers."""

import base64
import gzip
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}


def _get(name: str, path: str, **query: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": key, "in": "query", "schema": schema} for key, schema in query.items()]
    for part in path.split("{")[1:]:
        key = part.partition("}")[0]
        parameters.append({"name": key, "in": "path", "required": True, "schema": TEXT})
    return {
        "operationId": name,
        "summary": f"Get {name}.",
        "parameters": parameters,
        "responses": {"200": {"description": "ok"}},
    }


def _post(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "ok"}},
    }


def document(url: str) -> dict[str, Any]:
    """OpenAPI 3.0 document of the API below."""
    return {
        "openapi": "3.0.3",
        "info": {"title": "Test API", "version": "1"},
        "servers": [{"url": url + "/v1"}],
        "paths": {
            "/weather": {"get": _get("weather", "/weather", city=TEXT)},
            "/items/{id}": {
                "get": _get("get_item", "/items/{id}"),
                "delete": {**_get("delete_item", "/items/{id}")},
            },
            "/items": {
                "get": _get("list_items", "/items"),
                "post": _post("add_item", {"name": TEXT}),
            },
            "/status/{code}": {"get": _get("status", "/status/{code}")},
            "/flaky": {"get": _get("flaky", "/flaky", status=INTEGER, times=INTEGER, wait=TEXT)},
            "/slow": {"get": _get("slow", "/slow", seconds=NUMBER)},
            "/drip": {"get": _get("drip", "/drip")},
            "/redirect": {"get": _get("redirect", "/redirect", to=TEXT)},
            "/huge": {"get": _get("huge", "/huge", size=INTEGER)},
            "/bomb": {"get": _get("bomb", "/bomb")},
            "/binary": {"get": _get("binary", "/binary")},
            "/escapes": {"get": _get("escapes", "/escapes")},
            "/echo": {
                "get": _get("echo", "/echo", q=TEXT),
                "post": _post("echo_post", {"q": TEXT}),
            },
            "/drop": {"post": _post("drop", {"name": TEXT}), "get": _get("drop_read", "/drop")},
            "/fail": {"post": _post("fail", {"status": INTEGER})},
        },
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "ApiServer"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._route()

    do_POST = do_DELETE = do_GET

    def _route(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        name = parts.path.removeprefix("/v1/").split("/")[0]
        api = self.server
        with api.lock:
            api.hits[f"{self.command} {name}"] += 1
            api.seen.append((self.command, self.path, dict(self.headers), body))
        getattr(self, f"_{name}")(parts.path.rpartition("/")[2], query, body)

    def _send(
        self,
        value: Any,
        status: int = 200,
        kind: str = "application/json",
        **headers: str,
    ) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for key, text in headers.items():
            self.send_header(key.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def _weather(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send({"city": query.get("city"), "celsius": 21}, Set_Cookie="session=1; Path=/")

    def _items(self, last: str, query: dict[str, str], body: bytes) -> None:
        api = self.server
        if self.command == "POST":
            api.items.append(json.loads(body)["name"])
            self._send({"id": len(api.items) - 1})
        elif self.command == "DELETE":
            api.items[int(last)] = None
            self._send({"deleted": last})
        elif last == "items":
            self._send({"items": api.items})
        elif last.isdigit() and int(last) < len(api.items) and api.items[int(last)]:
            self._send({"name": api.items[int(last)]})
        else:
            self._send({"message": f"no item {last}"}, 404)

    def _status(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send({"code": last}, int(last))

    def _flaky(self, last: str, query: dict[str, str], body: bytes) -> None:
        api = self.server
        api.flaky += 1
        if api.flaky <= int(query["times"]):
            self._send({}, int(query["status"]), Retry_After=query.get("wait", "0"))
        else:
            self._send({"tries": api.flaky})

    def _slow(self, last: str, query: dict[str, str], body: bytes) -> None:
        time.sleep(float(query["seconds"]))
        self._send({"slept": query["seconds"]})

    def _drip(self, last: str, query: dict[str, str], body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(100):
            try:
                self.wfile.write(b"x")
            except OSError:
                return
            time.sleep(0.05)

    def _redirect(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send({}, 302, Location=query.get("to", "/v1/redirect"))

    def _huge(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send(b"x" * int(query["size"]), kind="text/plain")

    def _bomb(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send(gzip.compress(b"0" * (32 << 20)), kind="text/plain", Content_Encoding="gzip")

    def _binary(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send(bytes(range(256)), kind="image/png")

    def _escapes(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send("a\x1b[2Jb\u202ec".encode(), kind="text/plain; charset=utf-8")

    def _echo(self, last: str, query: dict[str, str], body: bytes) -> None:
        """Everything that was sent, also in the forms that a careless API would give it back in."""
        sent = [self.path, *self.headers.values(), body.decode()]
        words = [value.rpartition(" ")[2] for value in self.headers.values()]
        self._send(
            {
                "sent": sent,
                "base64": [base64.b64encode(f"user:{word}".encode()).decode() for word in words],
                "quoted": [quote(word, safe="") for word in words],
            },
            ETag=f'"{self.headers.get("Authorization", "none")}"',
        )

    def _drop(self, last: str, query: dict[str, str], body: bytes) -> None:
        self.server.dropped += 1
        self.close_connection = True  # the work is done, the answer is lost

    def _fail(self, last: str, query: dict[str, str], body: bytes) -> None:
        self._send({}, json.loads(body)["status"])


class ApiServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 from construction; counts what it sees."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.forget()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # clients that hang up are part of the tests

    def forget(self) -> None:
        self.hits: Counter[str] = Counter()
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.items: list[str | None] = []
        self.flaky = 0
        self.dropped = 0

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_document(self, folder: Path) -> Path:
        path = folder / "openapi.json"
        path.write_text(json.dumps(document(self.url)))
        return path

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
