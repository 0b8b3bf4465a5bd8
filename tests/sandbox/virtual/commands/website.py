"""A small website on the loopback address for requests to go to."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from smokebox import Egress

if TYPE_CHECKING:
    from smokebox.egress import Handler


@dataclass
class Website:
    """Address of a site, and the requests it has received."""

    url: str
    seen: list[dict[str, object]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def place(self) -> str:
        """Return host and port as policies name them."""
        return self.url.partition("://")[2]


def reach(*sites: Website, handler: Handler | None = None, **fields: Any) -> Egress:
    """Return a policy that allows some websites, each through the handler if one is given."""
    places = [site.place for site in sites]
    named: dict[str, Any] = {"tcp": places}
    if handler is not None:
        named = {"outbound_by_host": dict.fromkeys(places, handler)}
    return Egress(hosts={"127.0.0.1": "127.0.0.1"}, **named, **fields)


class Pages(BaseHTTPRequestHandler):
    """Handler of the paths /echo, /status/N, /redirect, /big, /gzip, /hang, /cut and /leak."""

    protocol_version = "HTTP/1.1"
    site: Website

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        request: dict[str, object] = {
            "method": self.command,
            "path": self.path,
            "headers": dict(self.headers),
            "body": body.decode("latin-1"),
        }
        self.site.seen.append(request)
        kind = parts.path.strip("/").split("/")[0]
        if kind == "redirect":
            status = int(query.get("status", ["302"])[0])
            leak = self.headers["Authorization"] if "leak" in query else ""
            self._respond(status, b"moved", {"Location": query["to"][0] + leak})
        elif kind == "status":
            self._respond(int(parts.path.rpartition("/")[2]), b"status body\n", {})
        elif kind == "big":
            self._respond(200, b"x" * int(query["n"][0]), {})
        elif kind == "gzip":
            compressed = gzip.compress(json.dumps(request).encode())
            self._respond(200, compressed, {"Content-Encoding": "gzip"})
        elif kind == "hang":
            self.site.stopping.wait(30)
        elif kind == "cut":
            self._respond(200, b"short", {}, length=100)
        elif kind == "leak":
            secret = self.headers.get("Authorization") or ""
            self._respond(200, f"you sent {secret}\n".encode(), {"X-Leak": secret})
        else:
            self._respond(200, json.dumps(request).encode(), {"Content-Type": "application/json"})

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

    def _respond(
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
    """A site that a thread serves until `stop`."""

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
        """Start serving."""
        self._thread.start()
        return self.site

    def stop(self) -> None:
        """Release requests that hang, and close the port."""
        self.site.stopping.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
