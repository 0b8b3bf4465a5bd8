"""A Postgres server for tests, on a Unix socket, as an unprivileged user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from short_directory import short_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian does not put these programs on PATH.
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
    """Return the path of a program of Postgres."""
    found = (shutil.which(name, path=None if at is None else str(at)) for at in _FOLDERS)
    return next((path for path in found if path is not None), None)


def unprivileged() -> list[str]:
    """Return a command prefix that drops root, as which Postgres refuses to run."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=nobody", f"--regid={_nobody().pw_gid}", "--clear-groups"]


def _nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server, and return the directory of its socket. Skips if Postgres is missing."""
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("Postgres is not installed: `apt install postgresql`")
    folder = short_directory("pg")
    data = f"{folder}/data"
    if os.geteuid() == 0:
        os.chown(folder, _nobody().pw_uid, _nobody().pw_gid)

    def run(*words: str) -> None:
        # A file, as the server would keep a pipe open.
        with open(f"{folder}/output", "ab+") as output:
            done = subprocess.run(
                [*unprivileged(), *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=120,
                check=False,
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")

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
