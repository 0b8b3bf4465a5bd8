"""A small site on the loopback address, for requests to go to."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass
class Website:
    """Where it is, and the requests it has seen."""

    url: str
    seen: list[dict[str, object]] = field(default_factory=list)
    going_down: threading.Event = field(default_factory=threading.Event)


class Pages(BaseHTTPRequestHandler):
    """Answers by path: /echo, /status/N, /redirect, /big, /gzip, /hang, /cut, /leak."""

    protocol_version = "HTTP/1.1"
    site: Website

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        told: dict[str, object] = {
            "method": self.command,
            "path": self.path,
            "headers": dict(self.headers),
            "body": body.decode("latin-1"),
        }
        self.site.seen.append(told)
        kind = parts.path.strip("/").split("/")[0]
        if kind == "redirect":
            status = int(query.get("status", ["302"])[0])
            self._answer(status, b"moved", {"Location": query["to"][0]})
        elif kind == "status":
            self._answer(int(parts.path.rpartition("/")[2]), b"status body\n", {})
        elif kind == "big":
            self._answer(200, b"x" * int(query["n"][0]), {})
        elif kind == "gzip":
            packed = gzip.compress(json.dumps(told).encode())
            self._answer(200, packed, {"Content-Encoding": "gzip"})
        elif kind == "hang":
            self.site.going_down.wait(30)
        elif kind == "cut":
            self._answer(200, b"short", {}, length=100)
        elif kind == "leak":
            secret = self.headers.get("Authorization") or ""
            self._answer(200, f"you sent {secret}\n".encode(), {"X-Leak": secret})
        else:
            self._answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True


class Running:
    """A site that is served by a thread until `stop`."""

    def __init__(self, scheme: str = "http") -> None:
        pages = type("Pages", (Pages,), {})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), pages)
        self.server.daemon_threads = True
        self.site = Website(f"{scheme}://127.0.0.1:{self.server.server_port}")
        pages.site = self.site  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    def start(self) -> Website:
        """Begin to answer."""
        self._thread.start()
        return self.site

    def stop(self) -> None:
        """Let go of requests that hang, and of the port."""
        self.site.going_down.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
