"""Package mirrors of the host in builds: what apt is configured for, and where requests go."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from building import BASE, build
from smokebox.egress.layers import EgressLayers, split_handlers
from smokebox.egress.policy import Egress, TenantEgress
from smokebox.engine.images.build.apt_mirrors import AptMirror, AptSettings, read_apt
from smokebox.engine.images.build.mirrors import Mirrors, read_mirrors
from smokebox.errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.host import Host

GET = f"FROM {BASE}\nRUN busybox wget -qO- http://debian.example.com/debian/dists/x\n"
BASIC = "Basic bWU6c2VjcmV0"


class Server(ThreadingHTTPServer):
    """A mirror or proxy that responds with what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.logins: list[str] = []


class Echo(BaseHTTPRequestHandler):
    """Responds with the target and the Host."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        names = ("authorization", "proxy-authorization")
        self.server.logins += [self.headers[name] for name in names if self.headers[name]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.path} {self.headers['host']}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A mirror or proxy on this host."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def layers(policy: Egress) -> EgressLayers:
    """Return the layers of a policy."""
    split = split_handlers(policy)
    return EgressLayers().with_settings(split.settings, split.granted)


def mirrors(url: str = "", *, proxy: str = "", login: str = "") -> Mirrors:
    """Return the mirrors of a host with a mirror of Debian, or with a proxy."""
    mirror = AptMirror(path="/debian", url=url, authorization=login)
    mirror_list = (mirror,) if url else ()
    return Mirrors(apt=AptSettings(mirrors=mirror_list, proxy=proxy))


DEBIAN = Egress(allowed_hosts=["debian.example.com"])


async def test_apt_of_a_step_gets_the_mirror_of_the_host(based: Host, server: Server) -> None:
    found = mirrors(f"{server.url}/nexus/debian-proxy", login=BASIC)
    built = await build(based, GET, egress=layers(DEBIAN), mirrors=found)
    assert built.output == f"/nexus/debian-proxy/dists/x {server.url[7:]}\n"
    assert server.logins == [BASIC]


async def test_apt_gets_the_mirror_where_every_host_is_open(based: Host, server: Server) -> None:
    policy = Egress(internet=True)
    text = GET.replace("debian.example.com", "ftp.debian.org")
    found = mirrors(f"{server.url}/nexus", login=BASIC)
    built = await build(based, text, egress=layers(policy), mirrors=found)
    assert built.output == f"/nexus/dists/x {server.url[7:]}\n"


async def test_apt_of_a_step_goes_through_the_proxy_of_the_host(
    based: Host, server: Server
) -> None:
    found = mirrors(
        "http://debian.example.com/debian", proxy=server.url.replace("//", "//me:secret@")
    )
    built = await build(based, GET, egress=layers(DEBIAN), mirrors=found)
    assert built.output == "http://debian.example.com/debian/dists/x debian.example.com\n"
    assert server.logins == [BASIC]


async def test_a_policy_that_does_not_allow_the_archive_keeps_the_mirror_closed(
    based: Host, server: Server
) -> None:
    found = mirrors(f"{server.url}/debian", login=BASIC)
    for policy in (Egress(), Egress(allowed_hosts=["example.com"])):
        with pytest.raises(BuildFailed):
            await build(based, GET, egress=layers(policy), mirrors=found)
    assert server.logins == []


async def test_a_tenant_gets_neither_logins_nor_private_addresses(
    based: Host, server: Server
) -> None:
    found = mirrors(f"{server.url}/debian", login=BASIC)
    tenant = TenantEgress(allowed_hosts=["debian.example.com"])
    with pytest.raises(BuildFailed):
        await build(based, GET, egress=layers(tenant), mirrors=found)
    granted = TenantEgress(allowed_hosts=["debian.example.com"], granted=["127.0.0.1"])
    built = await build(based, GET, egress=layers(granted), mirrors=found)
    assert built.output.startswith("/debian/dists/x")
    assert server.logins == []


async def test_a_private_address_of_a_mirror_is_reached_by_its_name(
    based: Host, server: Server
) -> None:
    place = {"debian.example.com": server.url[7:]}
    built = await build(based, GET, egress=layers(DEBIAN), mirrors=Mirrors(addresses=place))
    assert built.output == "/debian/dists/x debian.example.com\n"


def host(root: Path, **files: str) -> AptSettings:
    """Return the apt settings of a Debian with files in /etc/apt; `__` is a slash."""
    (root / "etc/apt").mkdir(parents=True)
    (root / "etc/os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    for name, text in files.items():
        path = root / "etc/apt" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_apt(str(root))


def test_sources_of_one_line_name_the_mirrors(tmp_path: Path) -> None:
    found = host(
        tmp_path,
        sources_DOT_list="# deb http://no/ bookworm main\n"
        "deb [arch=amd64] https://apt.corp/nexus/debian/ bookworm main\n"
        "deb http://me:secret@sec.corp bookworm-security main\n"
        "deb https://other.vendor/debian nodistro main\ndeb-src http://src/ bookworm main\n",
        auth_DOT_conf="machine apt.corp/nexus login me\n  password secret # here\n",
    )
    assert [(one.path, one.url, one.authorization) for one in found.mirrors] == [
        ("/debian", "https://apt.corp/nexus/debian", BASIC),
        ("/debian-security", "http://sec.corp", BASIC),
    ]
    assert "secret" not in repr(found)
    assert BASIC not in repr(found)


def test_sources_of_stanzas_name_the_mirrors(tmp_path: Path) -> None:
    found = host(
        tmp_path,
        sources_DOT_list_DOT_d__debian_DOT_sources="Types: deb deb-src\n# comment\n"
        "URIs: http://debian.example.com/debian\nSuites: bookworm bookworm-updates\n\n"
        "Types: deb\nURIs:\n http://mirror.corp/sec\nSuites: bookworm-security\n\n"
        "Types: deb\nURIs: http://off.corp\nSuites: bookworm\nEnabled: no\n",
        # A login without a scheme is for TLS only.
        auth_DOT_conf_DOT_d__a_DOT_conf="machine mirror.corp login me password secret\n",
    )
    assert [(one.url, one.authorization) for one in found.mirrors] == [
        ("http://debian.example.com/debian", ""),
        ("http://mirror.corp/sec", ""),
    ]


def test_a_host_without_apt_has_no_mirrors(tmp_path: Path) -> None:
    assert read_apt(str(tmp_path)) == AptSettings()


def test_indexes_with_a_password_or_a_file_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@index.corp/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://127.0.0.1/simple file:///srv/wheels")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:4873/")
    found = read_mirrors(["localhost", "*.example.com"])
    assert "PIP_INDEX_URL" not in found.variables
    assert found.variables["PIP_EXTRA_INDEX_URL"] == "https://127.0.0.1/simple"
    assert found.variables["npm_config_registry"] == "http://127.0.0.1:4873/"
    assert list(found.addresses) == ["localhost"]
