"""A project served by `smokebox dev` or `smokebox app` in a separate process."""

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

# A server starts within a second, but on a busy machine it takes longer.
TIMEOUT = 45.0
KEYS = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "MODEL", "SMOKEBOX_APP_KEYS", "SMOKEBOX_APP_STATE")


class ServedProject:
    """Running command that serves a project, with its output and its URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.expect(r"serves \S+ on (http://\S+)")

    def expect(self, pattern: str) -> str:
        """Wait for a pattern in its output; return the first group, or the whole match."""
        deadline = time.monotonic() + TIMEOUT
        while not (found := re.search(pattern, self.output)):
            assert self._reader.is_alive() or re.search(pattern, self.output), self.output
            assert time.monotonic() < deadline, f"{pattern!r} did not appear: {self.output}"
            time.sleep(0.02)
        return found[found.lastindex or 0]

    def request(
        self,
        path: str,
        body: object = None,
        *,
        timeout: float = TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request and return the JSON of the response, whatever the status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def stop(self) -> int:
        """Stop it with SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(TIMEOUT)
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
                self.output += line


@contextlib.contextmanager
def run_project(folder: Path, *arguments: str, **variables: str) -> Iterator[ServedProject]:
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
        project = ServedProject(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    try:
        yield project
    finally:
        project.close()


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a user without API keys."""
    env = {name: value for name, value in os.environ.items() if name not in KEYS}
    return {**env, "SMOKEBOX_HOME": str(folder / ".home"), **variables}
