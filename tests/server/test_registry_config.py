"""The tables `[registries]` of server.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.registry.access import RegistryConfig
from smokebox.errors import InvalidOption
from smokebox.server.config import load_server_config

if TYPE_CHECKING:
    from pathlib import Path


def test_registries_have_mirrors_credentials_and_plain_http(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "server.toml").write_text(
        f"""
        [registries]
        default = "Images.Example.com"

        [registries."docker.io"]
        mirror = "mirror.example.com:5000"

        [registries."mirror.example.com:5000"]
        plain_http = true
        username = "robot"
        password_file = "{tmp_path}/password"

        [registries."index.docker.io:443"]
        mirror = ["a.example.com", "b.example.com"]
        """
    )
    found = load_server_config(str(tmp_path)).registries
    assert found.default == "images.example.com"
    assert found.of("docker.io").mirrors == ("mirror.example.com:5000",)
    assert found.is_plain("mirror.example.com:5000")
    assert not found.is_plain("docker.io")
    credentials = found.of("mirror.example.com:5000").credentials("mirror.example.com:5000")
    assert credentials is not None
    assert (credentials.username, credentials.password) == ("robot", "secret")
    assert found.of("index.docker.io:443").mirrors == ("a.example.com", "b.example.com")
    assert found.of("other.example.com") == RegistryConfig()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('default = "a/b"', "default"),
        ("default = 1", "default"),
        ('["docker.io"]\nmirror = "a b"', "mirror"),
        ('["docker.io"]\nmirror = 1', "mirror"),
        ('["docker.io"]\nplain_http = "yes"', "plain_http"),
        ('["docker.io"]\nusername = "x"', "password_file"),
        ('["docker.io"]\nusername = "x"\npassword_file = "/missing"', "password_file"),
        ('["docker.io"]\nusername = "x:y"\npassword_file = "/etc/passwd"', "colon"),
        ('["docker.io"]\npassword = "x"', "password"),
        ('["https://docker.io"]\nplain_http = true', "not the name of a registry"),
        ('"docker.io" = 1', "is a table"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, problem: str) -> None:
    text = (
        text.replace('["', '[registries."', 1) if text.startswith('["') else f"[registries]\n{text}"
    )
    (tmp_path / "server.toml").write_text(text)
    with pytest.raises(InvalidOption, match=problem) as caught:
        load_server_config(str(tmp_path))
    assert caught.value.hint
