"""Programs running in the image `host`, as root and as an ordinary user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.host_image import HostImage
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.store import ImageStore, open_store
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from engine.images.guest import Guest

TLS = "import ssl, sqlite3, json; assert ssl.create_default_context().cert_store_stats()['x509_ca']"
RESOLVE = "import socket; socket.getaddrinfo('localhost', 80); socket.getservbyname('https')"


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        ("bash", ["-lc", "echo ~; cd /workspace && touch a && ls"]),
        ("python3", ["-c", TLS]),
        ("python3", ["-c", RESOLVE]),
        ("git", ["init", "-q", "/workspace/repository"]),
        ("node", ["-e", "require('https'); console.log(1 + 1)"]),
        ("perl", ["-MPOSIX", "-e", "print strftime('%Z', localtime)"]),
        ("java", ["-version"]),
        (
            "openssl",
            ["req", "-x509", "-nodes", "-subj", "/CN=a", "-out", "/tmp/c", "-keyout", "/tmp/k"],
        ),
        ("awk", ["BEGIN { print 1 }"]),
        ("file", ["/bin/sh"]),
    ],
)
def test_programs_of_the_host_run(guest: Guest, program: str, argv: list[str]) -> None:
    if not os.path.lexists(f"/usr/bin/{program}"):
        pytest.skip(f"this host has no {program}")
    result = guest.run(guest.get("host"), program, *argv)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("id -un; id -gn", "root\nroot\n"),
        ("getent passwd user", "user:x:1000:1000:user:/home/user:/bin/bash\n"),
        ("getent group tty", "tty:x:5:\n"),
        ("cat /etc/hostname", "sandbox\n"),
        ("date -d @0 +%H%Z", "00UTC\n"),
        ("ls -d /home/* /root/.[a-z]* /srv/* /mnt/* /opt/[!s]* 2>/dev/null", "/home/user\n"),
        ("readlink -f /var/run /var/lock", "/run\n/run/lock\n"),
        ("ls /etc/shadow /etc/ssh /etc/machine-id /usr/src 2>/dev/null", ""),
    ],
)
def test_system_files_are_generated(guest: Guest, command: str, output: str) -> None:
    assert guest.run(guest.get("host"), "sh", "-c", command).stdout == output


@pytest.mark.skipif(not os.path.lexists("/usr/bin/python3"), reason="this host has no python3")
def test_python_is_an_alias_of_python3(guest: Guest) -> None:
    result = guest.run(guest.get("host"), "python", "-c", "import json; print(json.dumps(1))")
    assert result.stdout == "1\n", result.stderr


def test_pam_accepts_root(guest: Guest) -> None:
    """adduser calls chfn, which uses PAM."""
    result = guest.run(guest.get("host"), "sh", "-c", "chfn -f Admin root && getent passwd root")
    assert ":Admin" in result.stdout, result.stderr


def test_programs_can_be_installed_in_usr_local(guest: Guest) -> None:
    command = "cp /bin/true /usr/local/bin/mine && mkdir /usr/local/share/mine && mine"
    result = guest.run(guest.get("host"), "sh", "-c", command)
    assert result.returncode == 0, result.stderr
    assert not os.path.exists("/usr/local/bin/mine")


def test_private_files_in_usr_are_hidden_from_root_inside(guest: Guest) -> None:
    """Root of a user namespace that maps root can read every file of root, except hidden ones."""
    host = guest.home / "host"
    for name in ("bin", "share/vault/deep", "src/app", "local/etc"):
        (host / "usr" / name).mkdir(parents=True)
        (host / "usr" / name / "token").write_text("secret")
        (host / "usr" / name / "token").chmod(0o600)
    (host / "usr/share/vault/public").write_text("public")
    (host / "etc").mkdir()
    source = HostImage(LayerStore(str(guest.home / "images")), host=str(host))
    image = guest.get("host", ImageStore({"host": source}))
    found = guest.run_outside(image, "/usr", "find", ".", "-type", "f")
    assert found.stdout.split() == ["./share/vault/public"], found.stderr


def test_directory_image_gets_etc_files_and_mount_points(guest: Guest) -> None:
    root = guest.home / "rootfs"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/resolv.conf").symlink_to("../run/stub-resolv.conf")
    store = open_store(str(guest.home / "images"), directories={"rootfs": str(root)})
    image = guest.get("dir:rootfs", store)
    result = guest.run_outside(image, "/", "sh", "-c", "cat etc/hosts etc/resolv.conf; ls")
    assert {"localhost", "nameserver"} <= set(result.stdout.split()), result.stderr
    assert {"proc", "dev", "workspace", "tmp"} <= set(result.stdout.split())


def test_pip_installs_as_root(guest: Guest) -> None:
    """Also where the host's Python has the mark externally-managed."""
    script = (
        "import zipfile\n"
        "with zipfile.ZipFile('/tmp/hello-1.0-py3-none-any.whl', 'w') as wheel:\n"
        "    wheel.writestr('hello.py', 'print(42)')\n"
        "    info = 'hello-1.0.dist-info/'\n"
        "    about = 'Metadata-Version: 2.1\\nName: hello\\nVersion: 1.0'\n"
        "    wheel.writestr(info + 'METADATA', about)\n"
        "    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any')\n"
        "    wheel.writestr(info + 'RECORD', '')\n"
    )
    if not os.path.lexists("/usr/bin/pip"):
        pytest.skip("this host has no pip")
    install = f'python3 -c "{script}" && pip install --no-index /tmp/*.whl && python3 -m hello'
    result = guest.run(guest.get("host"), "sh", "-c", install)
    assert result.stdout.endswith("42\n"), result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
@pytest.mark.timeout(120)
def test_programs_run_for_an_ordinary_user() -> None:
    rerun_as_nobody(__file__, "test")
