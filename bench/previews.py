"""Preview URLs compared with reverse proxies: requests per second, and download speed.

    python bench/previews.py [--seconds 5] [--rounds 3] [--gigabyte 1.0]

The same nginx runs in a sandbox, behind our server, and on the host, behind Caddy and behind
another nginx. wrk sends requests to each alternately, and the best round counts. A proxy that is
not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox import connect
from table import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
CONNECTIONS = 32
HEAD = """
worker_processes 1; daemon off; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000;
  client_body_temp_path {home}/b; proxy_temp_path {home}/p; fastcgi_temp_path {home}/f;
  uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
"""
ORIGIN = (
    HEAD
    + """  server {{
    listen 127.0.0.1:{port};
    location / {{ return 200 "hello\\n"; }}
    location /files/ {{ root {home}; }}
  }}
}}
"""
)
PROXY = (
    HEAD
    + """  upstream origin {{ server 127.0.0.1:{origin}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://origin; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Connection ""; proxy_set_header Host $http_host;
      proxy_set_header X-Forwarded-For $remote_addr;
    }}
  }}
}}
"""
)
CADDY = """
{{
  admin off
  auto_https off
}}
http://:{port} {{
  bind 127.0.0.1
  reverse_proxy 127.0.0.1:{origin}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route to the origin: the process of the proxy, and the headers of a request."""

    name: str
    port: int
    pid: int
    headers: tuple[str, ...] = ("Host: localhost",)

    @property
    def options(self) -> list[str]:
        """The options of wrk and curl that send the headers."""
        return [word for header in self.headers for word in ("-H", header)]


@dataclass(slots=True, kw_only=True)
class Figures:
    """Requests per second, microseconds of CPU per request, and bytes per second."""

    requests: float = 0.0
    cpu: float = 0.0
    download: float = 0.0


@contextlib.contextmanager
def program(command: list[str], port: int | None = None, **popen_options: object) -> Iterator[int]:
    """Run a program for the duration of the block, and yield its pid."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, **popen_options) as process:  # type: ignore[call-overload]
        try:
            while port is not None and not is_listening(port):
                assert process.poll() is None, command
                time.sleep(0.02)
            yield process.pid
        finally:
            process.terminate()


def is_listening(port: int) -> bool:
    """Return whether a program listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process and its children have used."""
    pids = [pid]
    with contextlib.suppress(OSError):
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    total = 0.0
    for one in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def load(route: Route, seconds: float) -> tuple[float, float]:
    """Return the requests per second, and the microseconds of CPU of each."""
    before = cpu_of(route.pid)
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}", *route.options]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{route.port}/"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Non-2xx" not in done, done
    lines = {
        line.split(":")[0].strip(): line.split(":")[1] for line in done.splitlines() if ":" in line
    }
    rate = float(lines["Requests/sec"])
    return rate, (cpu_of(route.pid) - before) / (rate * seconds) * 1e6


def download(route: Route, size: int) -> float:
    """Return the bytes per second of a download."""
    url = f"http://127.0.0.1:{route.port}/files/big"
    command = ["curl", "-s", "-o", os.devnull, "-w", "%{size_download} %{speed_download}"]
    output = subprocess.run(
        [*command, *route.options, url], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(output[0]) == size, output
    return float(output[1])


@contextlib.contextmanager
def nginx(home: Path, text: str, port: int, **options: int) -> Iterator[int]:
    """Run nginx with a configuration, and yield its pid."""
    home.mkdir()
    (home / "nginx.conf").write_text(text.format(home=home, port=port, **options))
    with program([NGINX, "-c", str(home / "nginx.conf")], port, stderr=subprocess.DEVNULL) as pid:
        yield pid


@contextlib.contextmanager
def others(home: Path, size: int) -> Iterator[list[Route]]:
    """Run the origin and the reverse proxies that are installed."""
    with contextlib.ExitStack() as stack:
        origin, routes = free_port(), []
        pid = stack.enter_context(nginx(home / "origin", ORIGIN, origin))
        (home / "origin" / "files").mkdir()
        os.truncate(os.open(home / "origin/files/big", os.O_CREAT | os.O_WRONLY, 0o644), size)
        # The workers of nginx run as another user.
        for directory in (home, home / "origin", home / "origin" / "files"):
            directory.chmod(0o755)
        routes.append(Route(name="direct", port=origin, pid=pid))
        port = free_port()
        pid = stack.enter_context(nginx(home / "proxy", PROXY, port, origin=origin))
        routes.append(Route(name="nginx", port=port, pid=pid))
        if caddy := shutil.which("caddy"):
            port = free_port()
            file = home / "Caddyfile"
            file.write_text(CADDY.format(port=port, origin=origin))
            command = [caddy, "run", "--adapter", "caddyfile", "--config", str(file)]
            env = {**os.environ, "HOME": str(home), "XDG_DATA_HOME": str(home)}
            pid = stack.enter_context(program(command, port, stderr=subprocess.DEVNULL, env=env))
            routes.append(Route(name="caddy", port=port, pid=pid))
        yield routes


async def expose(home: Path, size: int) -> tuple[str, ...]:
    """Start nginx in a sandbox, and return the headers of a request to its preview."""
    client = connect(f"unix:{home}/server.sock")
    sandbox = client.sandbox("bench", keep_alive=True, limits={"cpu": None})
    await sandbox.write_file("nginx.conf", ORIGIN.format(home="/workspace", port=3000))
    await sandbox.exec(f"mkdir files; truncate -s {size} files/big; chmod 755 . files")
    server = await sandbox.start_process([NGINX, "-c", "/workspace/nginx.conf"])
    await server.wait_for_port(3000, timeout=20)
    exposed = await sandbox.expose_port(3000)
    await client.aclose()
    return f"Host: {exposed.label}.localhost", f"X-Smokebox-Token: {exposed.token}"


@contextlib.contextmanager
def ours(home: Path, size: int) -> Iterator[Route]:
    """Run our server as a user would start it, and yield the route to the sandbox."""
    port = free_port()
    command = [sys.executable, "-m", "smokebox", "serve", "--home", str(home)]
    command += ["--port", str(port), "--pool", "0"]
    with program(command, port, stderr=subprocess.DEVNULL) as pid:
        headers = asyncio.run(expose(home, size))
        yield Route(name="smokebox", port=port, pid=pid, headers=headers)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabyte", type=float, default=1.0)
    options = parser.parse_args()
    if shutil.which("wrk") is None or not os.path.exists(NGINX):
        print("not measured: wrk or nginx is missing (apt-get install -y wrk nginx-light caddy)")
        return
    size = int(options.gigabyte * (1 << 30))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with others(home, size) as routes, ours(home / "state", size) as preview:
            found = {route.name: Figures() for route in (preview, *routes)}
            for _ in range(options.rounds):
                for route in (preview, *routes):
                    rate, cpu = load(route, options.seconds)
                    best = found[route.name]
                    if rate > best.requests:
                        best.requests, best.cpu = rate, cpu
                    best.download = max(best.download, download(route, size))
    report(found)


def report(found: dict[str, Figures]) -> None:
    """Print the figures, with ours as a multiple of each."""
    ours, write = found["smokebox"], sys.stdout.write
    write(f"{'':10} {'requests/s':>11} {'cpu/request':>12} {'MB/s':>8}   smokebox has, times\n")
    for name, one in found.items():
        requests, speed = ours.requests / one.requests, ours.download / one.download
        write(
            f"{name:10} {one.requests:11,.0f} {one.cpu:9.0f} us {one.download / 1e6:8,.0f}   "
            f"{requests:5.2f} the requests, {speed:5.2f} the speed\n"
        )


if __name__ == "__main__":
    main()
