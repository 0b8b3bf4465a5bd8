"""Files of the host that are in the image `host`, and files that never are."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.host_files import PRIVATE_KEY
from smokebox.engine.images.host_image import HostImage
from smokebox.engine.images.layer_store import LayerStore
from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.store import ImageStore

SECRET_NAMES = {
    *("shadow", "shadow-", "gshadow", "sudoers", "sudoers.d", "ssh", "machine-id", "docker"),
    *("kubernetes", "gitconfig", "npmrc", "pip.conf", "wgetrc", "apt", "crontab", "fstab"),
    *(
        "subuid",
        "subgid",
        "private",
        "krb5.conf",
        "settings.xml",
        "mysql",
        "postgresql",
        "wireguard",
    ),
}


async def image_of(host: Path, *, usr_local: bool = True) -> Image:
    layer_store = LayerStore(str(host.parent / "images"))
    return await HostImage(layer_store, host=str(host), usr_local=usr_local).get("host")


def layers_at(image: Image, target: str) -> list[Path]:
    return [Path(layer.path) for layer in image.layers if layer.target == target]


def files_below(top: Path) -> list[Path]:
    found = [path for path in top.rglob("*") if path.is_file() and not path.is_symlink()]
    assert found
    return found


def secrets_of_this_host() -> set[bytes]:
    names = ("shadow", "gshadow", "hostname", "machine-id", "passwd", "hosts", "resolv.conf")
    paths = [f"/etc/{name}" for name in names]
    return {Path(path).read_bytes() for path in paths if os.access(path, os.R_OK)} - {b""}


def exists(path: Path) -> bool:
    return os.path.lexists(path)


def is_whiteout(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


async def test_secrets_are_not_copied(host: Path) -> None:
    (root,) = layers_at(await image_of(host), "/")
    for path in files_below(root):
        text = path.read_text()
        for word in ("secret", "corp.example", "alice", "10.0.0.53", "0123456789abcdef"):
            assert word not in text, path


async def test_public_configuration_is_copied(host: Path) -> None:
    (root,) = layers_at(await image_of(host), "/")
    for name in ("ld.so.cache", "services", "ssl/certs/ca-certificates.crt", "maven/m2.conf"):
        assert "public" in (root / "etc" / name).read_text()
    assert (root / "etc/java-17-openjdk/security/java.security").is_file()
    assert os.readlink(root / "etc/ssl/certs/0a1b2c3d.0") == "Root.pem"
    assert os.readlink(root / "etc/os-release") == "../usr/lib/os-release"


@pytest.mark.parametrize("name", ["etc/services", "etc/ssl/certs/ca-certificates.crt"])
async def test_files_that_others_cannot_read_are_not_copied(host: Path, name: str) -> None:
    (host / name).chmod(0o640)
    (root,) = layers_at(await image_of(host), "/")
    assert not exists(root / name)


async def test_files_in_private_directories_are_not_copied(host: Path) -> None:
    (host / "etc/java-17-openjdk/security").chmod(0o700)
    (host / "etc/ssl").chmod(0o750)
    (root,) = layers_at(await image_of(host), "/")
    assert not (root / "etc/java-17-openjdk/security").exists()
    assert not (root / "etc/ssl/certs").exists()


async def test_private_keys_are_not_copied(host: Path) -> None:
    bundle = host / "etc/ssl/certs/ca-certificates.crt"
    bundle.write_bytes(b"-----BEGIN RSA " + PRIVATE_KEY + b"\n")
    (root,) = layers_at(await image_of(host), "/")
    assert not (root / "etc/ssl/certs/ca-certificates.crt").exists()


async def test_special_files_and_foreign_symlinks_are_skipped(host: Path) -> None:
    (host / "etc/services").unlink()
    os.mkfifo(host / "etc/services")
    (host / "etc/protocols").symlink_to("/etc/shadow")
    (host / "etc/rpc").symlink_to("/root/.ssh/id_ed25519")
    (host / "etc/fonts").symlink_to("/root")
    (root,) = layers_at(await image_of(host), "/")
    for name in ("services", "protocols", "rpc", "fonts"):
        assert not exists(root / "etc" / name)


async def test_private_files_in_usr_are_hidden(host: Path) -> None:
    mask, usr = layers_at(await image_of(host), "/usr")
    assert usr == host / "usr"
    for name in (
        "share/agent/.agent/id_ed25519",
        "local/lib/vpn/token",
        "local/etc",
        "pip.conf",
        "src",
    ):
        assert is_whiteout(mask / name), name
    assert not exists(mask / "local/bin/tool")


async def test_mask_keeps_the_modes_of_directories(host: Path) -> None:
    (host / "usr/share/agent").chmod(0o1775)
    mask, _ = layers_at(await image_of(host), "/usr")
    assert (mask / "share/agent").stat().st_mode & 0o7777 == 0o1775


@pytest.mark.parametrize("usr_local", [True, False])
async def test_private_usr_local_is_hidden(host: Path, usr_local: bool) -> None:
    (host / "usr/local").chmod(0o750)
    mask = layers_at(await image_of(host, usr_local=usr_local), "/usr")[0]
    assert is_whiteout(mask / "local") if usr_local else (mask / "local").is_dir()


async def test_symlinked_usr_local_is_not_followed(host: Path) -> None:
    (host / "usr/local").rename(host / "elsewhere")
    (host / "usr/local").symlink_to("../elsewhere")
    assert not exists(layers_at(await image_of(host), "/usr")[0] / "local")
    mask = layers_at(await image_of(host, usr_local=False), "/usr")[0]
    assert (mask / "local").is_dir()


async def test_usr_local_can_be_excluded(host: Path) -> None:
    (host / "etc/alternatives").mkdir()
    (host / "etc/alternatives/tool").symlink_to("/usr/local/bin/tool")
    image = await image_of(host, usr_local=False)
    (local,) = layers_at(image, "/usr/local")
    assert (local / "bin").is_dir()
    assert files_below(host / "usr/local")
    assert not [path for path in local.rglob("*") if not path.is_dir()]
    (root,) = layers_at(image, "/")
    assert not exists(root / "etc/alternatives/tool")
    assert image.digest != (await image_of(host)).digest


async def test_merged_and_separate_directories_beside_usr(host: Path) -> None:
    merged = await image_of(host)
    (root,) = layers_at(merged, "/")
    assert os.readlink(root / "bin") == "usr/bin"
    assert not layers_at(merged, "/bin")
    (host / "bin").unlink()
    (host / "bin").mkdir()
    split = await image_of(host)
    assert layers_at(split, "/bin") == [host / "bin"]
    assert (layers_at(split, "/")[0] / "bin").is_dir()
    assert not exists(layers_at(split, "/")[0] / "lib64")


@pytest.mark.parametrize(
    "name",
    ["etc/ld.so.cache", "usr/lib/os-release", "etc/ssl/certs/ca-certificates.crt"],
)
async def test_upgrade_of_the_host_changes_the_digest(host: Path, name: str) -> None:
    before = await image_of(host)
    assert await image_of(host) == before
    (host / name).write_text("public, and of a later release\n")
    after = await image_of(host)
    assert after.digest != before.digest
    assert all(path.is_dir() for path in layers_at(before, "/"))


async def test_new_alternatives_and_packages_change_the_digest(host: Path) -> None:
    digests = {(await image_of(host)).digest}
    (host / "etc/alternatives").mkdir()
    digests.add((await image_of(host)).digest)
    (host / "etc/alternatives/sh").symlink_to("/usr/bin/sh")
    digests.add((await image_of(host)).digest)
    (host / "usr/share/service").mkdir()
    digests.add((await image_of(host)).digest)
    assert len(digests) == 4


async def test_host_without_usr_is_refused(tmp_path: Path) -> None:
    (tmp_path / "host/etc").mkdir(parents=True)
    with pytest.raises(Unsupported, match="dir:NAME"):
        await image_of(tmp_path / "host")


async def test_modes_do_not_depend_on_the_umask(host: Path) -> None:
    before = os.umask(0o077)
    try:
        image = await image_of(host)
    finally:
        os.umask(before)
    (root,) = layers_at(image, "/")
    modes = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "etc": 0o755, "etc/passwd": 0o644}
    for name, mode in modes.items():
        assert (root / name).stat().st_mode & 0o7777 == mode, name
    if os.geteuid() == 0:
        assert (root / "home/user").stat().st_uid == 1000


async def test_copied_files_of_this_host_are_readable_by_all(
    store: ImageStore,
) -> None:
    root = Path((await store.get("host")).layers[0].path)
    for path in files_below(root):
        original = Path("/") / path.relative_to(root)
        if original.is_file() and original.read_bytes() == path.read_bytes():
            assert original.stat().st_mode & stat.S_IROTH, original
        assert PRIVATE_KEY not in path.read_bytes()


@pytest.mark.parametrize(
    ("programs", "usr_local", "added"),
    [
        (["bin/python3"], True, True),
        (["bin/python3", "bin/python"], True, False),
        (["bin/python3", "local/bin/python"], True, False),
        (["bin/python3", "local/bin/python"], False, True),
        ([], True, False),
    ],
)
async def test_python_alias_is_added_if_missing(
    host: Path, programs: list[str], usr_local: bool, added: bool
) -> None:
    for program in programs:
        (host / "usr" / program).parent.mkdir(parents=True, exist_ok=True)
        (host / "usr" / program).touch()
    mask = layers_at(await image_of(host, usr_local=usr_local), "/usr")[0]
    assert exists(mask / "bin/python") == added
    assert not added or os.readlink(mask / "bin/python") == "python3"


async def test_no_private_name_or_content_of_this_host(store: ImageStore) -> None:
    root = Path((await store.get("host")).layers[0].path)
    names = {path.name for path in (root / "etc").iterdir()}
    assert not names & SECRET_NAMES
    assert os.listdir(root / "etc/pam.d") == ["other"]
    assert not [path for path in files_below(root) if path.read_bytes() in secrets_of_this_host()]
    assert not list((root / "home").glob("*/*"))
    assert not list((root / "root").iterdir())
