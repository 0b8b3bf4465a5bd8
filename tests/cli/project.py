"""Project for a test, and the command that serves it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from cli.terminal import SMOKEBOX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# A server starts within a second, or many on a busy machine.
PATIENCE = 45.0
KEYS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "MODEL", "SMOKEBOX_APP_KEYS", "SMOKEBOX_APP_STATE")


class Serving:
    """Running command that serves a project, its output and its URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.expect(r"serves \S+ on (http://\S+)")

    def expect(self, pattern: str) -> str:
        """Wait for a pattern in its output; return the first group, or the whole match."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.said)):
            assert self._reader.is_alive() or re.search(pattern, self.said), self.said
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.said}"
            time.sleep(0.02)
        return found[found.lastindex or 0]

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        timeout: float = PATIENCE,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request and return the JSON of the response, whatever the status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def stop(self) -> int:
        """Stop it with SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.said += line


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, **variables: str) -> Iterator[Serving]:
    """Run `smokebox ARGUMENTS` in a folder, on a free port."""
    process = subprocess.Popen(
        [SMOKEBOX, *arguments, "--port", "0"],
        cwd=folder,
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        served = Serving(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    try:
        yield served
    finally:
        served.close()


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a user without API keys."""
    env = {name: value for name, value in os.environ.items() if name not in KEYS}
    return {**env, "SMOKEBOX_HOME": str(folder / ".home"), **variables}
