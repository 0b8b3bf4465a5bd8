"""Where the server of a state directory is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from smokebox.wire.place import default_home, log_path, socket_path

if TYPE_CHECKING:
    import pytest


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", "~/boxes")
    assert default_home() == os.path.expanduser("~/boxes")


def test_otherwise_it_is_with_the_data_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMOKEBOX_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == "/data/smokebox"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_home() == os.path.expanduser("~/.local/share/smokebox")


def test_socket_and_log_are_in_it() -> None:
    assert (socket_path("/h"), log_path("/h")) == ("/h/server.sock", "/h/server.log")
