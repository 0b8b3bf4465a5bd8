"""TCP proxy in front of an HTTP server that records the requests."""

from __future__ import annotations

import re
import socket
import threading
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from types import TracebackType

_REQUEST = re.compile(rb"^(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r$", re.MULTILINE)


class RecordingProxy:
    """Listens on its own port. `requests` has the method and target of each, in order."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._target = (address.hostname or "", address.port or 80)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.requests: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for side in self._open:
            side.close()

    def bodies(self) -> int:
        """Return the number of objects downloaded: responses to GET that are not listings."""
        return sum(line.startswith("GET ") and "list-type" not in line for line in self.requests)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._open += [client, server]
            threading.Thread(target=self._relay, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._relay, args=(server, client, False), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, record: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if record:
                    self._record(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _record(self, data: bytes) -> None:
        with self._lock:
            for method, target in _REQUEST.findall(data):
                self.requests.append(f"{method.decode()} {target.decode()}")
