"""A Postgres server of the tests' own, without a network, as an ordinary user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from places import short_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian keeps them out of the way of its own wrappers.
_FOLDERS = (*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), None)
_SETTINGS = (
    "listen_addresses=''",
    "fsync=off",
    "autovacuum=off",
    "max_connections=60",
    "shared_buffers=16MB",
    "unix_socket_directories={folder}",
)


def program(name: str) -> str | None:
    """Where a program of Postgres is."""
    found = (shutil.which(name, path=None if at is None else str(at)) for at in _FOLDERS)
    return next((path for path in found if path is not None), None)


def ordinary_user() -> list[str]:
    """What to put before a command: Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=nobody", f"--regid={_nobody().pw_gid}", "--clear-groups"]


def _nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """The directory of the socket of a server that runs. Skips where there is no Postgres."""
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("Postgres is not installed: `apt install postgresql`")
    folder = short_directory("pg")
    data = f"{folder}/data"
    if os.geteuid() == 0:
        os.chown(folder, _nobody().pw_uid, _nobody().pw_gid)

    def run(*words: str) -> None:
        # Not a pipe, which the server would hold open.
        with open(f"{folder}/said", "ab+") as said:
            done = subprocess.run(
                [*ordinary_user(), *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=120,
                check=False,
            )
            said.seek(0)
            assert done.returncode == 0, said.read().decode(errors="replace")

    try:
        run(initdb, "-D", data, "-U", "smokebox", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = " ".join(
            f"-c {setting}" for setting in (*_SETTINGS, f"unix_socket_directories={folder}")
        )
        run(pg_ctl, "-D", data, "-w", "-t", "60", "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield folder
        finally:
            run(pg_ctl, "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
