"""Registries on loopback ports: Debian's `docker-registry`, and a proxy that misbehaves."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

USER, PASSWORD = "puller", "pässword: with colon"
# 1 is PR_SET_PDEATHSIG: the server ends even if the tests are killed.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
_START_SECONDS = 15


class RegistryServer:
    """A running `docker-registry`. `authority` is its host and port."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.authority = f"127.0.0.1:{port}"

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.authority}"


@contextlib.contextmanager
def run_registry(
    directory: Path, auth: dict[str, Any] | None = None, *, tls: dict[str, str] | None = None
) -> Iterator[RegistryServer]:
    """Run a registry that stores its images in a directory, for the duration of the block."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed: apt-get install -y docker-registry")
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {
            "filesystem": {"rootdirectory": str(directory / "data")},
            "delete": {"enabled": True},
        },
        "http": {"addr": f"127.0.0.1:{port}", "secret": "secret", **({"tls": tls} if tls else {})},
        **({"auth": auth} if auth else {}),
    }
    # JSON is YAML.
    (directory / "config.yml").write_text(json.dumps(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-ISc", _LAUNCH, program, "serve", str(directory / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        _wait_until_ready(process, port, directory / "log")
        yield RegistryServer(directory, port)
    finally:
        process.kill()
        process.wait()


def htpasswd_auth(directory: Path) -> dict[str, Any]:
    """Return the setting of a registry that takes `USER` and `PASSWORD`."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "htpasswd"
    subprocess.run(["htpasswd", "-Bbc", str(file), USER, PASSWORD], check=True, capture_output=True)
    return {"htpasswd": {"realm": "test registry", "path": str(file)}}


class TokenServer:
    """A token server as the registry's documentation describes it. It listens once opened.

    `seen` has each request: its query or form, and the Authorization header. With `requires`,
    only that user and password, or an identity token of `identity_tokens`, get a token.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.seen: list[dict[str, str]] = []
        self.requires: tuple[str, str] | None = None
        self.identity_tokens: set[str] = set()
        self.seconds = 300
        self.failing: int | None = None
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _certificate(self._key)
        self.bundle = directory / "token.pem"
        self.bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    @property
    def realm(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}/token"

    @property
    def auth(self) -> dict[str, Any]:
        """The setting of a registry that trusts it."""
        return {
            "token": {
                "realm": self.realm,
                "service": "test-registry",
                "issuer": "test-issuer",
                "rootcertbundle": str(self.bundle),
            }
        }

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[TokenServer]:
        """Serve on this event loop until the block ends."""
        app = web.Application()
        app.router.add_route("*", "/token", self._token)
        async with serve(app, self.port):
            yield self

    async def _token(self, request: web.Request) -> web.Response:
        values = {**request.query, **{k: str(v) for k, v in (await request.post()).items()}}
        self.seen.append({**values, "authorization": request.headers.get("authorization", "")})
        if self.failing is not None:
            return web.Response(status=self.failing, headers={"retry-after": "70"})
        if self.requires is not None and not self._is_known(request, values):
            return web.json_response({"errors": [{"code": "UNAUTHORIZED"}]}, status=401)
        return web.json_response({"token": self._sign(values.get("scope", ""))})

    def _is_known(self, request: web.Request, values: dict[str, str]) -> bool:
        if values.get("grant_type") == "refresh_token":
            return values.get("refresh_token") in self.identity_tokens
        assert self.requires is not None
        pair = base64.b64encode(":".join(self.requires).encode()).decode()
        return request.headers.get("authorization") == f"Basic {pair}"

    def _sign(self, scope: str) -> str:
        access = []
        if scope:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        der = self._certificate.public_bytes(serialization.Encoding.DER)
        header = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(der).decode()]}
        claims = {
            "iss": "test-issuer",
            "sub": "",
            "aud": "test-registry",
            "exp": now + self.seconds,
            "nbf": now - 10,
            "iat": now,
            "jti": secrets.token_hex(8),
            "access": access,
        }
        signed = f"{_url64(json.dumps(header).encode())}.{_url64(json.dumps(claims).encode())}"
        der_signature = self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        r, s = utils.decode_dss_signature(der_signature)
        return f"{signed}.{_url64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


class RegistryProxy:
    """Passes requests on to a registry, unless a fault responds in its place.

    `seen` has method and path of each request, and `headers` their headers.
    """

    def __init__(self, registry: RegistryServer | None) -> None:
        self.port = free_port()
        self.seen: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Callable[[web.Request], Awaitable[web.StreamResponse | None]]] = []
        self._registry = registry

    @property
    def authority(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.port}"

    def count(self, method: str, part: str) -> int:
        """Return how many requests of a method had this in their path."""
        return sum(one == method and part in path for one, path in self.seen)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[RegistryProxy]:
        """Serve on this event loop until the block ends."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        async with (
            ClientSession(auto_decompress=False, timeout=ClientTimeout(60)) as self._session,
            serve(app, self.port),
        ):
            yield self

    async def fetch(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the registry's own response."""
        assert self._registry is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length")
        }
        body = await request.read()
        async with self._session.request(
            request.method,
            f"{self._registry.url}{request.rel_url}",
            headers=headers,
            data=body or None,
            allow_redirects=False,
        ) as response:
            data = await response.read()
            kept = {
                name: value.replace(self._registry.authority, self.authority)
                for name, value in response.headers.items()
                if name.lower() not in ("transfer-encoding", "connection", "date")
            }
            return response.status, kept, data

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, str(request.rel_url)))
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        for fault in self.faults:
            if (response := await fault(request)) is not None:
                return response
        if self._registry is None:
            return web.Response(status=404)
        status, headers, data = await self.fetch(request)
        if request.method == "HEAD":
            return web.Response(status=status, headers=headers)
        headers.pop("Content-Length", None)
        return web.Response(status=status, headers=headers, body=data)


async def cut_off(request: web.Request, data: bytes, at: int, **headers: str) -> web.StreamResponse:
    """Respond with a part of a body, and reset the connection."""
    response = web.StreamResponse(headers={"content-length": str(len(data)), **headers})
    await response.prepare(request)
    await response.write(data[:at])
    assert request.transport is not None
    request.transport.close()
    return response


@contextlib.asynccontextmanager
async def serve(app: web.Application, port: int) -> AsyncIterator[None]:
    """Serve an app on a loopback port until the block ends."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()


def put(url: str, data: bytes, media_type: str = "application/octet-stream") -> None:
    """Send a PUT request."""
    request = urllib.request.Request(url, data, {"Content-Type": media_type}, method="PUT")
    with urllib.request.urlopen(request, timeout=20) as response:
        assert response.status == 201, response.status


def put_blob(registry: str, repository: str, data: bytes) -> str:
    """Upload a blob to a registry without authorization, and return its digest."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    url = f"{registry}/v2/{repository}/blobs/uploads/"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=20) as started:
        location = started.headers["Location"]
    put(f"{location}{'&' if '?' in location else '?'}digest={digest}", data)
    return digest


def put_manifest(registry: str, repository: str, tag: str, data: bytes, media_type: str) -> str:
    """Upload a manifest, and return its digest."""
    put(f"{registry}/v2/{repository}/manifests/{tag}", data, media_type)
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.02)
    pytest.fail(f"docker-registry did not start: {log.read_text()}")


def self_signed(directory: Path, address: str = "127.0.0.1") -> dict[str, str]:
    """Write a certificate for an address, and return the setting of a registry that uses it."""
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate, private = directory / "tls.pem", directory / "tls.key"
    made = _certificate(key, address)
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return {"certificate": str(certificate), "key": str(private)}


def _certificate(key: ec.EllipticCurvePrivateKey, address: str = "127.0.0.1") -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test server")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
