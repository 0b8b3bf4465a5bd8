"""Images that programs run in, and a fake host of a few files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from debian_base import make_debian_base
from engine.images.guest import Guest, can_unshare
from short_directory import short_directory
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.store import ImageStore, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    """An image store with a directory of its own."""
    if not can_unshare():
        pytest.skip("this host forbids user namespaces to this user")
    home = Path(short_directory("images"))
    yield Guest(home)
    # The work directory of an overlay has mode 000.
    subprocess.run(["chmod", "-R", "u+rwx", str(home)], check=True, capture_output=True)
    shutil.rmtree(home)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """An empty store of this host."""
    return open_store(str(tmp_path / "images"))


FAKE_HOST = {
    "etc/hostname": "db7.corp.example\n",
    "etc/hosts": "10.1.2.3 db7.corp.example\n",
    "etc/resolv.conf": "nameserver 10.0.0.53\n",
    "etc/passwd": "alice:x:1001:1001:Alice Example:/home/alice:/bin/zsh\n",
    "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
    "etc/environment": "https_proxy=http://alice:secret@proxy.corp.example\n",
    "etc/gitconfig": "[credential]\n helper = secret\n",
    "etc/npmrc": "//registry/:_authToken=secret\n",
    "etc/pip.conf": "index-url = https://alice:secret@pypi.corp.example\n",
    "etc/ssh/ssh_host_ed25519_key": "secret\n",
    "etc/maven/settings.xml": "<password>secret</password>\n",
    "etc/maven/m2.conf": "main is public\n",
    "etc/java-17-openjdk/net.properties": "http.proxyPassword=secret\n",
    "etc/java-17-openjdk/security/java.security": "public\n",
    "etc/ssl/certs/ca-certificates.crt": "public\n",
    "etc/ssl/certs/ssl-cert-snakeoil.pem": "CN=db7.corp.example\n",
    "etc/ssl/openssl.cnf": "engine = secret\n",
    "etc/ld.so.cache": "public\n",
    "etc/services": "public\n",
    "usr/bin/sh": "public\n",
    "usr/lib/os-release": "NAME=Example\n",
    "usr/share/ca-certificates/Root.crt": "public\n",
    "usr/share/agent/.agent/id_ed25519": "secret\n",
    "usr/src/app/.env": "TOKEN=secret\n",
    "usr/pip.conf": "secret\n",
    "usr/local/bin/tool": "public\n",
    "usr/local/etc/npmrc": "secret\n",
    "usr/local/lib/vpn/token": "secret\n",
    "root/.ssh/id_ed25519": "secret\n",
}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The root directory of a host with merged /usr, and with secrets in many places."""
    root = tmp_path / "host"
    for name, text in FAKE_HOST.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("usr/share/agent/.agent/id_ed25519", "usr/local/lib/vpn/token"):
        (root / name).chmod(0o600)
    for name in ("bin", "lib", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    (root / "etc/ssl/certs/Root.pem").symlink_to("/usr/share/ca-certificates/Root.crt")
    (root / "etc/ssl/certs/0a1b2c3d.0").symlink_to("Root.pem")
    return root


@pytest.fixture
def layer_store(tmp_path: Path) -> Iterator[LayerStore]:
    """An empty store of layers."""
    home = tmp_path / "home"
    home.mkdir()
    store = LayerStore(str(home / "images"), home=str(home))
    yield store
    store.close()


@pytest.fixture(scope="session")
def debian_base() -> Path:
    """A root file system of Debian with Python; a test that uses it needs a timeout of 300 s."""
    return make_debian_base()
