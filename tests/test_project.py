"""Secrets of a project, from the environment and `.env`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smokebox.errors import InvalidOption
from smokebox.project import Secrets, parse_dotenv

if TYPE_CHECKING:
    from pathlib import Path

NAME = "SMOKEBOX_TEST_SECRET"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=plain", "plain"),
        ("A = spaced ", "spaced"),
        ("export A=exported\n", "exported"),
        ("# before\n\nA=after # a comment\n", "after"),
        ("A=has#no-comment", "has#no-comment"),
        ("A='single # kept'", "single # kept"),
        ("A='no \\n escape'  # c", "no \\n escape"),
        ('A="line\\nbreak"', "line\nbreak"),
        ('A="a \\"quoted\\" word"#c', 'a "quoted" word'),
        ('A="-----BEGIN\nKEY-----"\n', "-----BEGIN\nKEY-----"),
        ("A=first\nA=second\n", "second"),
        ("A=crlf\r\nB=x\r\n", "crlf"),
        ("A=", ""),
        ("A=b=c==", "b=c=="),
        ("A=it's", "it's"),
    ],
)
def test_dotenv_file_is_parsed(text: str, value: str) -> None:
    assert parse_dotenv(text)["A"] == value


@pytest.mark.parametrize("text", ["s3cret", "=s3cret", "A='s3cret", 'A="s3cret', "1A=s3cret"])
def test_invalid_line_is_named_by_its_number_only(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"\.env, line 2, is not NAME=value") as caught:
        parse_dotenv(f"B=fine\n{text}")
    assert "s3cret" not in str(caught.value)


# A busy machine generates values slowly.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text()))
def test_quoted_values_round_trip(values: dict[str, str]) -> None:
    def quoted(value: str) -> str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = "".join(f"{name}={quoted(value)}\n" for name, value in values.items())
    assert parse_dotenv(text) == values


def test_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(f"{NAME}=from-file\n")
    secrets = Secrets(tmp_path)
    assert getattr(secrets, NAME) == "from-file"
    monkeypatch.setenv(NAME, "from-process")
    assert getattr(secrets, NAME) == "from-process"
    monkeypatch.setenv(NAME, "")
    assert getattr(secrets, NAME) == "from-file"


def test_file_is_beside_the_project_configuration(tmp_path: Path) -> None:
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    assert Secrets(inner).file == inner / ".env"
    (tmp_path / "smokebox.toml").touch()
    assert Secrets(inner).file == tmp_path / ".env"


def test_missing_secret_names_the_variable_and_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=rf"{NAME} is not set.*{tmp_path}/\.env") as caught:
        getattr(Secrets(tmp_path), NAME)
    assert caught.value.fields["option"] == NAME


def test_binary_file_is_an_error_without_its_content(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe")
    with pytest.raises(InvalidOption, match="it is not text"):
        getattr(Secrets(tmp_path), NAME)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=s3cret\n")
    assert "s3cret" not in repr(Secrets(tmp_path))
