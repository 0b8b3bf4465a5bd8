"""The server of a soak test, as an operator would start it, and what it uses of the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crash.engine_process import children

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCE = Path(__file__).parents[2] / "src"
_READY_SECONDS = 120.0
_MEBIBYTE = 1 << 20

CONFIG = """
[network]
private = {private}

[profiles.default]
memory = "256MiB"
disk = "256MiB"
pids = 128
concurrency = 32
tenant_cpu = {cores}
sandboxes = {sandboxes}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Megabytes, descriptors and processes of a server and its helpers, without sandboxes."""

    memory: float
    files: int
    processes: int

    def __str__(self) -> str:
        return f"{self.memory:.0f} MB, {self.files} files, {self.processes} processes"


class SoakServer:
    """A server in a process of its own, which can be killed and started again."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, *, origins: Iterable[int], sandboxes: int) -> None:
        """Write the operator's configuration."""
        self.home.mkdir(mode=0o700, exist_ok=True)
        private = [f"127.0.0.1:{port}" for port in origins]
        # One tenant cannot take the CPU from all others.
        cores = (os.cpu_count() or 1) / 2
        text = CONFIG.format(private=private, sandboxes=sandboxes, cores=cores)
        (self.home / "server.toml").write_text(text)

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        command = [sys.executable, "-m", "smokebox", "serve", "--keys"]
        command += ["--home", str(self.home), "--port", str(self._port), "--pool", "4"]
        command += ["--address-connections", "512"]
        with open(self.home.parent / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd="/",
                # As a service has it: the kernel divides the CPU among sessions, where there is
                # no cgroup, and the load would be in the server's.
                start_new_session=True,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
            )
        deadline = time.monotonic() + _READY_SECONDS
        while not self._listens():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server; its sandboxes keep running."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Stop the server in order, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def usage(self) -> Usage:
        """Return what the server uses."""
        assert self._process is not None
        pid = self._process.pid
        pids = [pid, *children(pid)]
        memory = 0.0
        for one in pids:
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
                shared = int(Path(f"/proc/{one}/statm").read_text().split()[2])
                memory += (pages - shared) * os.sysconf("SC_PAGE_SIZE") / _MEBIBYTE
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return Usage(memory=memory, files=files, processes=len(pids))

    def log(self) -> str:
        """Return the end of its log."""
        return (self.home.parent / "server.log").read_text()[-4000:]

    def _listens(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/api/health", timeout=5),
        ):
            return True
        return False
