"""Ports that are listened on, by either version of the protocol, and the error for one in use."""

from __future__ import annotations

import re
import socket

import pytest

from smokebox.errors import Conflict
from smokebox.wire.listening import listen, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", r"http://127\.0\.0\.1:\d+"), ("::1", r"http://\[::1\]:\d+")],
)
def test_an_address_of_either_version_is_listened_on(host: str, url: str) -> None:
    with listen(host, 0) as listener:
        assert re.fullmatch(url, url_of(listener))
        with socket.create_connection(listener.getsockname()[:2]) as connection:
            connection.sendall(b"hello")
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(5) == b"hello"
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_in_use_is_a_conflict_with_a_hint() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Conflict, match=f"127.0.0.1:{port} cannot be listened on") as caught:
            listen("127.0.0.1", port, hint="Take another.")
    assert (caught.value.hint, caught.value.name) == ("Take another.", str(port))
