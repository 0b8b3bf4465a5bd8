"""Bindings: what a project's file names, and what is said of one that is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import env, get_sandbox
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
[sandboxes.PyBox]
image = "host"
limits = "lite"
cwd = "/tmp"

[sandboxes.Big]
limits = { memory = 1000000000 }
env = { MODE = "big" }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this process works in, below the project's own."""
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


def test_a_file_above_names_kinds_of_sandboxes(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    assert (env.PyBox.name, env.PyBox.settings.limits) == ("PyBox", "lite")
    assert env.Big.settings.env == {"MODE": "big"}
    assert dir(env) == ["Big", "PyBox"]
    sandbox = get_sandbox(env.PyBox, "user-42")
    assert (sandbox.id, sandbox.cwd) == ("user-42", "/tmp")
    assert get_sandbox(env.PyBox, "user-42", cwd="/usr").cwd == "/usr"


def test_a_pyproject_may_hold_them_too(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.smokebox.sandboxes.Own]\nimage = 'host'\n")
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert env.Own.file == str(project / "pyproject.toml")


def test_the_nearest_file_counts(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    (project / "src" / "smokebox.toml").write_text("[sandboxes.Near]\n")
    assert dir(env) == ["Near"]


def test_a_name_that_is_not_there_is_answered_with_the_nearest(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    with pytest.raises(InvalidOption, match=r"smokebox.toml names no .*Did you mean 'PyBox'"):
        _ = env.PiBox


def test_without_a_file_the_error_says_what_to_write(project: Path) -> None:
    with pytest.raises(InvalidOption, match=r"\[sandboxes.PyBox\]"):
        _ = env.PyBox


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[sandboxes.A]\nimag = 'x'\n", r"smokebox.toml: \[sandboxes.A\] .*'imag'.*'image'"),
        ("[sandbox.A]\n", r"smokebox.toml has no option 'sandbox'.*'sandboxes'"),
        ("sandboxes = 3\n", "smokebox.toml: sandboxes is a table"),
        ("[sandboxes.A]\nkeep_alive = 'yes'\n", r"\[sandboxes.A\]: keep_alive: expected"),
        ("[sandboxes.A\n", "smokebox.toml is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_key(project: Path, text: str, told: str) -> None:
    (project / "smokebox.toml").write_text(text)
    with pytest.raises(InvalidOption, match=told):
        _ = env.A


def test_a_binding_needs_an_id(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    with pytest.raises(InvalidOption, match="needs an id"):
        get_sandbox(env.PyBox)  # type: ignore[call-overload]
