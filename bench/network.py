"""Overhead of the egress proxy on a request, compared with no proxy and with mitmproxy.

    python bench/network.py [--requests 300] [--rounds 5] [--seconds 4] [--gigabyte 0.25]
                            [--mitmdump PATH]

One nginx serves TLS on the loopback interface. Requests are sent to it directly; from inside a
sandbox, through the egress proxy, where a handler adds a token to each request and responses are
scrubbed of it; and through mitmproxy, where an addon adds the token. They alternate in one run.
mitmproxy is installed into a temporary folder, unless `--mitmdump` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from smokebox.egress.policy import Egress
from smokebox.engine import Host
from smokebox.engine.jail import linux
from smokebox.engine.jail.network import set_up
from table import Table, free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request

HOST, TOKEN = "api.test", "benchmark-token-5f3a9c77"
PYTHON, NGINX = "/usr/bin/python3", shutil.which("nginx") or "/usr/sbin/nginx"
CONF = """
worker_processes 1; daemon off; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000;
  client_body_temp_path {home}/b; proxy_temp_path {home}/p; fastcgi_temp_path {home}/f;
  uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  server {{
    listen 127.0.0.1:{port} ssl; root {home};
    ssl_certificate {home}/server.pem; ssl_certificate_key {home}/server.pem;
  }}
}}
"""
# Prints the seconds of each request on one connection, after some to warm up.
CLIENT = """
import json, socket, ssl, sys, time
host, port, count, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
raw = socket.create_connection((host, port))
raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
sock = context.wrap_socket(raw, server_hostname="api.test")
request = f"GET {path} HTTP/1.1\\r\\nHost: api.test\\r\\nUser-Agent: b\\r\\nAccept: */*\\r\\n\\r\\n"
request = request.encode()
def send():
    sock.sendall(request)
    data = b""
    while (end := data.find(b"\\r\\n\\r\\n")) < 0:
        data += sock.recv(65536)
    head = data[:end].lower()
    assert b" 200 " in head[:20], head
    at = head.index(b"content-length: ") + 16
    left = int(head[at:].split(b"\\r\\n")[0]) - (len(data) - end - 4)
    while left > 0:
        left -= len(sock.recv(1 << 20))
for _ in range(20 if count > 1 else 0):
    send()
times = []
for _ in range(count):
    began = time.perf_counter()
    send()
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""
ADDON = f"""
def request(flow):
    flow.request.headers["authorization"] = "Bearer {TOKEN}"
"""


@dataclass(frozen=True)
class Route:
    """A route to the server: how to run a client, and the address that it connects to."""

    name: str
    run: Callable[[list[str]], Awaitable[str]]
    host: str
    port: int


async def add_token(request: Request, env: Any, context: HandlerContext) -> Request:
    """Add a token, as handlers of users do."""
    request.headers["authorization"] = f"Bearer {TOKEN}"
    return request


async def run_here(words: list[str]) -> str:
    """Run a program on this machine."""
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode()


def certificate(home: Path) -> None:
    """Write a self-signed certificate for the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = signed.public_bytes(serialization.Encoding.PEM)
    (home / "ca.pem").write_bytes(pem)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (home / "server.pem").write_bytes(secret + pem)


@contextlib.contextmanager
def running(words: list[str], port: int) -> Iterator[None]:
    """Run a server process, and wait until it listens."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.05)
            yield
        finally:
            server.terminate()


def find_mitmdump(home: Path, path: str | None) -> str | None:
    """Return the path of mitmdump, after installing it; None if that fails."""
    if path is not None:
        return path
    folder = home / "mitmproxy"
    print("installing mitmproxy into a temporary folder ...", flush=True)
    try:
        subprocess.run([PYTHON, "-m", "venv", str(folder)], check=True, capture_output=True)
        pip = [str(folder / "bin/pip"), "install", "-q", "mitmproxy"]
        subprocess.run(pip, check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"mitmproxy cannot be installed and is left out: {error}")
        return None
    return str(folder / "bin/mitmdump")


@contextlib.contextmanager
def proxied(home: Path, program: str | None, server: int) -> Iterator[list[Route]]:
    """Run mitmproxy, if installed, and yield the route through it."""
    if program is None:
        yield []
        return
    port = free_port()
    (home / "addon.py").write_text(ADDON)
    words = [program, "-q", "--mode", f"reverse:https://127.0.0.1:{server}@{port}"]
    words += ["--ssl-insecure", "-s", str(home / "addon.py")]
    words += ["--set", f"confdir={home}/confdir", "--set", "keep_host_header=true"]
    words += ["--set", "connection_strategy=lazy"]
    with running(words, port):
        yield [Route("mitmproxy", run_here, "127.0.0.1", port)]


async def latency(table: Table, routes: list[Route], requests: int, rounds: int) -> None:
    """Measure sequential requests on one connection."""
    times: dict[str, list[float]] = {route.name: [] for route in routes}
    for _ in range(rounds):
        for route in routes:
            words = [PYTHON, "-c", CLIENT, route.host, str(route.port), str(requests), "/small"]
            times[route.name] += json.loads(await route.run(words))
    direct = times["direct"]
    added = {}
    for name, measured in times.items():
        table.line(f"a request, {name}", measured, to="direct", other=direct)
        added[name] = (statistics.median(measured) - statistics.median(direct)) * 1e3
    for name, over in list(added.items())[1:]:
        table.text(f"{f'added by {name}':42} {over:9.2f} ms")
    if "mitmproxy" in added:
        share = added["egress proxy"] / added["mitmproxy"]
        table.text(f"{'egress proxy to mitmproxy, added':42} {share:9.2f}    (goal: 0.25 or less)")


async def rates(table: Table, routes: list[Route], seconds: int, rounds: int) -> None:
    """Measure the maximum rate of requests on sixteen connections; the best round counts."""
    wrk = shutil.which("wrk")
    if wrk is None:
        table.text("rates are not measured: wrk is not installed (apt-get install -y wrk)")
        return
    best = dict.fromkeys((route.name for route in routes), 0.0)
    for _ in range(rounds):
        for route in routes:
            words = [wrk, "-t1", "-c16", f"-d{seconds}s", "-H", f"Host: {HOST}"]
            output = await route.run([*words, f"https://{route.host}:{route.port}/small"])
            assert "Non-2xx" not in output, output
            rate = float(output.split("Requests/sec:")[1].split()[0])
            best[route.name] = max(best[route.name], rate)
    for name, rate in best.items():
        ratio = rate / best["direct"]
        table.text(f"{f'requests a second, {name}':42} {rate:9.0f} {'':17} {ratio:7.2f}  direct")
    if best.get("mitmproxy"):
        ratio = best["egress proxy"] / best["mitmproxy"]
        table.text(f"{'egress proxy to mitmproxy, requests':42} {ratio:9.1f}")


async def downloads(table: Table, routes: list[Route], size: int, rounds: int) -> None:
    """Measure the download of a large file; the best round counts."""
    best = dict.fromkeys((route.name for route in routes), float("inf"))
    for _ in range(rounds):
        for route in routes:
            words = [PYTHON, "-c", CLIENT, route.host, str(route.port), "1", "/large"]
            best[route.name] = min(best[route.name], *json.loads(await route.run(words)))
    for name, seconds in best.items():
        speed = size / seconds / 1e6
        ratio = best["direct"] / seconds
        table.text(f"{f'MB/s of a download, {name}':42} {speed:9.0f} {'':17} {ratio:7.2f}  direct")


def time_network_setup(count: int, results: multiprocessing.connection.Connection) -> None:
    """Send the times of setting up the network of a sandbox, from a separate process."""
    times = []
    for _ in range(count):
        linux.unshare(linux.NEWNET)
        began = time.perf_counter()
        doors = set_up()
        times.append(time.perf_counter() - began)
        doors.close()
    results.send(times)


def network_setup(table: Table, count: int) -> None:
    """Measure the set-up of the network of a sandbox."""
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=time_network_setup, args=(count, sender)
    )
    process.start()
    process.join(60)
    if not receiver.poll():
        table.text("network set-up is not measured: it needs root")
        return
    times = receiver.recv()
    table.line("making the network of a sandbox", times, to="itself", other=times)


async def measure(options: argparse.Namespace, home: Path) -> None:
    """Run all measurements."""
    certificate(home)
    os.environ["SSL_CERT_FILE"] = str(home / "ca.pem")
    server = free_port()
    (home / "nginx.conf").write_text(CONF.format(home=home, port=server))
    (home / "small").write_bytes(b"x" * 1000)
    size = int(options.gigabyte * 1e9)
    with (home / "large").open("wb") as file:
        file.truncate(size)
    home.chmod(0o755)
    program = find_mitmdump(home, options.mitmdump)
    policy = Egress(outbound_by_host={HOST: add_token}, hosts={HOST: f"127.0.0.1:{server}"})
    async with await Host.open(home / "home", pool=0) as host:
        sandbox = await host.create("bench", egress=policy)

        async def run_inside(words: list[str]) -> str:
            result = await sandbox.exec(words)
            assert result.exit_code == 0, result.stderr
            return result.stdout

        with (
            running([NGINX, "-c", str(home / "nginx.conf")], server),
            proxied(home, program, server) as others,
        ):
            routes = [
                Route("direct", run_here, "127.0.0.1", server),
                Route("egress proxy", run_inside, HOST, 443),
                *others,
            ]
            table = Table()
            await latency(table, routes, options.requests, options.rounds)
            await rates(table, routes, options.seconds, 2)
            await downloads(table, routes, size, 2)
    network_setup(table, 100)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--gigabyte", type=float, default=0.25)
    parser.add_argument("--mitmdump")
    options = parser.parse_args()
    if not os.path.exists(NGINX):
        print("not measured: nginx is not installed (apt-get install -y nginx-light)")
        return
    with tempfile.TemporaryDirectory(prefix="smokebox-bench-") as folder:
        uvloop.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
