"""`server.toml`: its tables, and errors that name the file, the key and the nearest name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidOption
from smokebox.limits import GIB
from smokebox.server.config import ServerConfig, load_server_config

if TYPE_CHECKING:
    from pathlib import Path


def load(tmp_path: Path, text: str) -> ServerConfig:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "server.toml").write_text(text)
    return load_server_config(str(home))


def test_missing_file_grants_nothing(tmp_path: Path) -> None:
    assert load_server_config(str(tmp_path)) == ServerConfig()


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"none\.toml cannot be read"):
        load_server_config(str(tmp_path), str(tmp_path / "none.toml"))


def test_named_file_is_read_instead_of_the_default(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[handlers]\nallow = ["a.b:c"]\n')
    (tmp_path / "server.toml").write_text("not toml")
    assert load_server_config(str(tmp_path), str(other)).handlers == ("a.b:c",)


def test_tables_are_read(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    rootfs.mkdir()
    config = load(
        tmp_path,
        f"""
        [images]
        debian = "{rootfs}"
        [network]
        private = ["10.0.0.0/8", "192.0.2.7", "10.0.0.7:5432", "[fd00::1]:80", "fd00::/8"]
        [handlers]
        allow = ["acme.egress:add_token", "acme.handlers.*"]
        [storage]
        pool = "50GiB"
        [profiles.small]
        memory = "1GiB"
        cpu = "unlimited"
        sandboxes = 3
        egress = ["*.example.com"]
        private = ["10.0.0.7:5432"]
        """,
    )
    assert config.directories == {"debian": str(rootfs)}
    assert config.storage_pool == 50 * GIB
    assert config.private_networks[2:4] == ("10.0.0.7:5432", "[fd00::1]:80")
    assert config.handlers == ("acme.egress:add_token", "acme.handlers.*")
    small = config.profiles["small"]
    assert (small.name, small.limits.memory, small.limits.pids) == ("small", GIB, 1024)
    assert small.egress is not None
    assert small.private == ("10.0.0.7:5432",)
    assert (small.sandboxes, small.egress[0].text) == (3, "*.example.com")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = [", "is not TOML"),
        ("[netwrok]", "no option 'netwrok'. Did you mean 'network'?"),
        ("network = 1", "network is a table"),
        ("[network]\nprivat = []", "[network] has no option 'privat'. Did you mean 'private'?"),
        ('[network]\nprivate = "10.0.0.0/8"', "network.private is a list of IP networks"),
        ('[network]\nprivate = ["10.0.0.1/8"]', "network.private: '10.0.0.1/8' is not a network"),
        ('[network]\nprivate = ["db.test:80"]', "network.private: 'db.test:80' is not a network"),
        ('[handlers]\nallow = ["json"]', "handlers.allow is a list of handlers"),
        ('[handlers]\nallow = ["a b:c"]', "handlers.allow is a list of handlers"),
        ('[images]\nA = "/usr"', "images.A is the name of an image"),
        ('[images]\na = "usr"', "images.a is an existing directory"),
        ('[images]\na = "/no/such/directory"', "images.a is an existing directory"),
        ("[profiles]\nsmall = 1", "small is a table"),
        ("[profiles.s]\nmemroy = 1", "[profiles.s] has no option 'memroy'. Did you mean 'memory'?"),
        ("[profiles.s]\nmemory = 5", "[profiles.s]: memory is at least 65536 bytes"),
        ("[profiles.s]\nsandboxes = 0", "sandboxes is a positive whole number"),
        ("[profiles.s]\nsandboxes = 1.5", "sandboxes is a positive whole number"),
        ("[profiles.s]\nrate = true", "rate is a positive number"),
        ('[profiles.s]\nimages = "host"', "images is a list of names"),
        ('[profiles.s]\negress = ["a/b"]', "egress: 'a/b' is a URL"),
        ('[profiles.s]\ntier = "docker"', "there is no tier 'docker'"),
        ('[profiles.s]\nprivate = ["x"]', "private: 'x' is not a network"),
        ("[profiles.s]\ntotal_cpu = 4", "total_cpu needs cpu"),
        ("[profiles.s]\ntenant_cpu = 0", "tenant_cpu is a positive number"),
        ("[profiles.s]\ntenant_cpu = 1\ncpu = 2", "cpu is above tenant_cpu, which is 1"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "home" / "server.toml") in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("path", ["", "home", "home/boxes", "link"])
def test_state_directory_cannot_be_an_image(tmp_path: Path, path: str) -> None:
    (tmp_path / "home" / "boxes").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home" / "boxes")
    with pytest.raises(InvalidOption, match="has nothing in common"):
        load(tmp_path, f'[images]\na = "{tmp_path / path}"\n')
