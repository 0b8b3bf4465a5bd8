"""State directories, sockets and ports of servers on this machine."""

from __future__ import annotations

import os
import re
import socket

import pytest

from smokebox.errors import Conflict
from smokebox.foundation.endpoint import default_home, listen, log_path, socket_path, url_of


def test_environment_variable_sets_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", "~/boxes")
    assert default_home() == os.path.expanduser("~/boxes")


def test_default_state_directory_is_in_the_data_home_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SMOKEBOX_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == "/data/smokebox"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_home() == os.path.expanduser("~/.local/share/smokebox")


def test_socket_and_log_are_in_the_state_directory() -> None:
    assert (socket_path("/h"), log_path("/h")) == ("/h/server.sock", "/h/server.log")


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", r"http://127\.0\.0\.1:\d+"), ("::1", r"http://\[::1\]:\d+")],
)
def test_listener_accepts_ipv4_and_ipv6(host: str, url: str) -> None:
    with listen(host, 0) as listener:
        assert re.fullmatch(url, url_of(listener))
        with socket.create_connection(listener.getsockname()[:2]) as connection:
            connection.sendall(b"hello")
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(5) == b"hello"
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_port_in_use_is_a_conflict_with_a_hint() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            listen("127.0.0.1", port, hint="Choose another port.")
    assert (caught.value.hint, caught.value.name) == ("Choose another port.", str(port))
