"""Where the server of a state directory is found on this machine."""

from __future__ import annotations

import os


def default_home() -> str:
    """Where the state directory is when nobody says, as an absolute path."""
    if told := os.environ.get("SMOKEBOX_HOME"):
        return os.path.abspath(os.path.expanduser(told))
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        # The XDG specification has relative paths ignored.
        data = os.path.expanduser("~/.local/share")
    return os.path.join(data, "smokebox")


def socket_path(home: str) -> str:
    """The unix socket that the server of a state directory listens on."""
    return os.path.join(home, "server.sock")


def log_path(home: str) -> str:
    """What a server in the background writes to."""
    return os.path.join(home, "server.log")
