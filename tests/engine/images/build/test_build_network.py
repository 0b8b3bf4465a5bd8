"""The network of builds: what RUN and ADD reach, and what of it is in no layer."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from building import BASE, build, sha, status_of, tree
from smokebox.egress.layers import EgressLayers, split_handlers
from smokebox.egress.policy import parse_egress
from smokebox.errors import BuildFailed, InvalidDockerfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.host import Host

BUNDLE = "etc/ssl/certs/ca-certificates.crt"


def egress(**policy: object) -> EgressLayers:
    """Return the layers of a policy."""
    split = split_handlers(parse_egress(policy))
    return EgressLayers().with_settings(split.settings, split.granted)


async def test_certificates_of_the_proxy_are_in_no_layer(based: Host) -> None:
    policy = egress(allowed_hosts=["example.com"])
    built = await build(
        based,
        f"""
        FROM {BASE}
        RUN grep -q CERTIFICATE $SSL_CERT_FILE && touch /trusted
        COPY bundle /{BUNDLE}
        RUN grep -c CERTIFICATE /{BUNDLE} && touch /kept
        RUN echo added >> /{BUNDLE} && env > /seen
        """,
        {"bundle": "own\n"},
        egress=policy,
    )
    found = await tree(based, built.digest)
    assert "trusted" in found
    assert "kept" in found
    assert built.output == "2\n"
    assert found[BUNDLE][4] == sha("own\nadded\n")
    assert sorted(path for path in found if path.startswith("etc/ssl/")) == [
        "etc/ssl/certs",
        BUNDLE,
    ]
    assert not any(path.startswith("usr/local") for path in found)


def packed() -> bytes:
    """Return an archive with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("inner")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))
    return buffer.getvalue()


ARCHIVE = packed()


class Files(BaseHTTPRequestHandler):
    """Serves an archive, a redirect to it, and a redirect to another host."""

    def do_GET(self) -> None:
        targets = {"/moved": "/a.tgz", "/away": "http://other.test/a.tgz"}
        if self.path in targets:
            self.send_response(302)
            self.send_header("Location", targets[self.path])
            self.end_headers()
            return
        self.send_response(200 if self.path == "/a.tgz" else 404)
        self.end_headers()
        self.wfile.write(ARCHIVE)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def policy() -> Iterator[EgressLayers]:
    """A policy that leads `files.test` to a server on this host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield egress(
            allowed_hosts=["files.test"], hosts={"files.test": f"127.0.0.1:{server.server_port}"}
        )
        server.shutdown()
        thread.join()


async def test_adds_urls_without_unpacking_them(based: Host, policy: EgressLayers) -> None:
    digest = hashlib.sha256(ARCHIVE).hexdigest()
    built = await build(
        based,
        f"""
        FROM {BASE}
        ADD http://files.test/a.tgz /one/
        ADD --checksum=sha256:{digest} http://files.test/moved /two
        ADD --unpack=true http://files.test/a.tgz /three
        """,
        egress=policy,
    )
    found = await tree(based, built.digest)
    content = hashlib.sha256(ARCHIVE).digest()
    assert found["one/a.tgz"][4] == found["two"][4] == content
    assert status_of(found, "one/a.tgz") == ("0o600", 0, 0)
    assert "three/inner" in found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ADD http://files.test/none /x", "responds 404"),
        ("ADD http://files.test/away /x", r"does not allow other\.test"),
        ("ADD --checksum=sha256:{:064} http://files.test/a.tgz /x", "has the digest"),
    ],
)
async def test_refuses_responses_that_are_not_the_file(
    based: Host, policy: EgressLayers, line: str, message: str
) -> None:
    with pytest.raises((BuildFailed, InvalidDockerfile), match=message):
        await build(based, f"FROM {BASE}\n{line.format(0)}", egress=policy)
