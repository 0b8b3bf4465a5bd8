"""State directory with its own server, and the command line that uses it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from cli.terminal import PATIENCE, SMOKEBOX
from smokebox.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Served:
    """Runs `smokebox` against the server of one state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "SMOKEBOX_HOME": str(home)}
        self.env.pop("SMOKEBOX_URL", None)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command line within this process, which is much faster, and return its output."""
        said = [io.BytesIO(), io.BytesIO()]
        given, out, err = map(io.TextIOWrapper, (io.BytesIO(stdin.encode()), *said))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("SMOKEBOX_HOME", "SMOKEBOX_URL", "SMOKEBOX_API_KEY"):
                patch.delenv(name, raising=False)
                if name in self.env:
                    patch.setenv(name, self.env[name])
            for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            code = run(list(arguments))
        out.flush()
        err.flush()
        texts = [one.getvalue().decode() for one in said]
        return subprocess.CompletedProcess(arguments, code, *texts)

    def apart(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command as a separate process and return its output."""
        options = {"input": "", "text": True, "env": self.env, **options}
        return subprocess.run(
            [SMOKEBOX, *arguments], capture_output=True, check=False, timeout=PATIENCE, **options
        )

    def says(self, *arguments: str, stdin: str = "") -> str:
        """Run a command line that must succeed without errors, and return its output."""
        done = self.run(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    @contextlib.contextmanager
    def started(self, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Yield the running command; kill it at the end if needed."""
        options = {"stdin": subprocess.DEVNULL, "text": True, "env": self.env, **options}
        process = subprocess.Popen([SMOKEBOX, *arguments], stdout=subprocess.PIPE, **options)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
