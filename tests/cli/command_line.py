"""The `smokebox` command, used with the server of a state directory."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from cli.terminal import SMOKEBOX, TIMEOUT
from smokebox.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class CommandLine:
    """Runs `smokebox` against the server of one state directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "SMOKEBOX_HOME": str(home)}
        self.env.pop("SMOKEBOX_URL", None)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command line in this process, which is faster, and return its result."""
        raw = [io.BytesIO(), io.BytesIO()]
        given, out, err = map(io.TextIOWrapper, (io.BytesIO(stdin.encode()), *raw))
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
        texts = [one.getvalue().decode() for one in raw]
        return subprocess.CompletedProcess(arguments, code, *texts)

    def run_process(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command line in a separate process and return its result."""
        options = {"input": "", "text": True, "env": self.env, **options}
        return subprocess.run(
            [SMOKEBOX, *arguments], capture_output=True, check=False, timeout=TIMEOUT, **options
        )

    def output(self, *arguments: str, stdin: str = "") -> str:
        """Run a command line that must succeed without errors, and return its output."""
        done = self.run(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    @contextlib.contextmanager
    def start(self, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Start a command line in a separate process, and kill it after the block."""
        options = {"stdin": subprocess.DEVNULL, "text": True, "env": self.env, **options}
        process = subprocess.Popen([SMOKEBOX, *arguments], stdout=subprocess.PIPE, **options)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.02)
