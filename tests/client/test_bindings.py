"""Bindings of a project's file, and the errors for invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import Sandbox, env, get_sandbox, get_virtual_sandbox
from smokebox.egress import Response
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
[sandboxes.PyBox]
image = "host"
limits = "lite"
cwd = "/tmp"
lifetime = "2h"

[sandboxes.Big]
limits = { memory = 1000000000 }
env = { MODE = "big" }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory below that of a project."""
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


def test_bindings_are_read_from_a_file_above(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    assert (env.PyBox.name, env.PyBox.settings.limits) == ("PyBox", "lite")
    assert env.PyBox.settings.lifetime == "2h"
    assert env.Big.settings.env == {"MODE": "big"}
    assert dir(env) == ["Big", "PyBox"]
    sandbox = get_sandbox(env.PyBox, "user-42")
    assert (sandbox.id, sandbox.cwd) == ("user-42", "/tmp")
    assert get_sandbox(env.PyBox, "user-42", cwd="/usr").cwd == "/usr"


def test_bindings_are_read_from_pyproject(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.smokebox.sandboxes.Own]\nimage = 'host'\n")
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert env.Own.file == str(project / "pyproject.toml")


def test_nearest_file_wins(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    (project / "src" / "smokebox.toml").write_text("[sandboxes.Near]\n")
    assert dir(env) == ["Near"]


def test_unknown_binding_names_the_nearest(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    with pytest.raises(InvalidOption, match=r"smokebox.toml names no .*Did you mean 'PyBox'"):
        _ = env.PiBox


def test_error_without_a_file_says_what_to_write(project: Path) -> None:
    with pytest.raises(InvalidOption, match=r"\[sandboxes.PyBox\]"):
        _ = env.PyBox


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sandboxes.A]\nimag = 'x'\n", r"smokebox.toml: \[sandboxes.A\] .*'imag'.*'image'"),
        ("[sandbox.A]\n", r"smokebox.toml has no option 'sandbox'.*'sandboxes'"),
        ("sandboxes = 3\n", "smokebox.toml: sandboxes is a table"),
        ("[sandboxes.A]\nkeep_alive = 'yes'\n", r"\[sandboxes.A\]: keep_alive: expected"),
        ("[sandboxes.A]\nclass_name = 3\n", r"\[sandboxes.A\]: class_name is the name of a class"),
        ("[sandboxes.A\n", "smokebox.toml is not TOML"),
    ],
)
def test_invalid_value_is_reported_with_file_and_key(
    project: Path, text: str, message: str
) -> None:
    (project / "smokebox.toml").write_text(text)
    with pytest.raises(InvalidOption, match=message):
        _ = env.A


def test_binding_needs_an_id(project: Path) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    with pytest.raises(InvalidOption, match="needs an id"):
        get_sandbox(env.PyBox)


def test_binding_has_an_egress_policy(project: Path) -> None:
    (project / "smokebox.toml").write_text(
        '[sandboxes.Net.egress]\nallowed_hosts = ["*.example.com"]\nmax_requests = 9\n'
        'outbound_by_host = { "api.example.com" = "handlers:add_token" }\n'
    )
    assert env.Net.settings.egress == {
        "allowed_hosts": ["*.example.com"],
        "max_requests": 9,
        "outbound_by_host": {"api.example.com": "handlers:add_token"},
    }
    (project / "smokebox.toml").write_text('[sandboxes.Net]\negress = ["a.test"]\n')
    assert env.Net.settings.egress == {"allowed_hosts": ["a.test"]}
    (project / "smokebox.toml").write_text('[sandboxes.Net]\negress.tcp = ["db.test"]\n')
    with pytest.raises(InvalidOption, match="port from 1 to 65535"):
        _ = env.Net
    (project / "smokebox.toml").write_text('[sandboxes.Net]\ntcp = ["db.test:1"]\n')
    with pytest.raises(InvalidOption, match=r"Use tcp in the table \[sandboxes.Net.egress\]"):
        _ = env.Net


def test_name_without_binding_is_a_secret(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "smokebox.toml").write_text(TEXT)
    (project / ".env").write_text("MY_TEST_TOKEN=from-file\nPyBox=never\n")
    assert env.MY_TEST_TOKEN == "from-file"
    assert env.PyBox.name == "PyBox"
    monkeypatch.setenv("MY_TEST_TOKEN", "from-process")
    assert env.MY_TEST_TOKEN == "from-process"


def test_missing_secret_is_reported_with_variable_and_file(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.smokebox.sandboxes.Own]\nimage = 'host'\n")
    with pytest.raises(InvalidOption, match=rf"MY_TEST_TOKEN is not set.*{project}/\.env"):
        _ = env.MY_TEST_TOKEN


async def test_bucket_of_the_project_is_a_sandbox(project: Path) -> None:
    folder = project / "objects"
    folder.mkdir()
    (folder / "notes.txt").write_text("found")
    (project / "smokebox.toml").write_text(
        f'[buckets.KNOWLEDGE_BASE]\nurl = "file://{folder}"\nread_only = true\n'
    )
    assert dir(env) == ["KNOWLEDGE_BASE"]
    async with await get_virtual_sandbox(env.KNOWLEDGE_BASE) as sandbox:
        assert (await sandbox.exec("cat notes.txt")).stdout == "found"
        assert (await sandbox.exec("echo x > notes.txt")).exit_code != 0


def test_bucket_has_the_credentials_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (project / "smokebox.toml").write_text('[buckets.KB]\nbucket = "kb"\nregion = "eu"\n')
    (project / ".env").write_text("AWS_ACCESS_KEY_ID=id\nAWS_SECRET_ACCESS_KEY=s3cret\n")
    assert env.KB.options["secret_key"] == "s3cret"
    assert "s3cret" not in repr(env.KB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[buckets.A]\nregion = 'eu'\n", "a bucket has either url or bucket"),
        ("[buckets.A]\nurl = 's3://a'\nbucket = 'a'\n", "a bucket has either url or bucket"),
        ("[buckets.A]\nbucket = 'a'\nregio = 'eu'\n", "Did you mean 'region'"),
        (
            "[buckets.A]\nbucket = 'a'\nsecret_key = 'x'\n",
            r"does not belong.*AWS_SECRET_ACCESS_KEY=.*env",
        ),
        ("[buckets]\nA = 3\n", "buckets.A is a table"),
    ],
)
def test_invalid_bucket_is_refused(project: Path, text: str, message: str) -> None:
    (project / "smokebox.toml").write_text(text)
    with pytest.raises(InvalidOption, match=message):
        _ = env.A


def test_a_binding_has_settings_and_handlers_of_a_class_with_another_name(project: Path) -> None:
    class BoundBoxSandbox(Sandbox):
        limits = "lite"
        cwd = "/srv"
        outbound_by_host = {"api.example.com": lambda request, env, context: Response("ok")}  # noqa: RUF012

    (project / "smokebox.toml").write_text(
        '[sandboxes.PyBox]\nclass_name = "BoundBoxSandbox"\nimage = "./docker/py.Dockerfile"\n'
        'cwd = "/tmp"\negress = ["api.github.com", "api.example.com"]\n'
    )
    sandbox = get_sandbox(env.PyBox, "user-42", labels={"a": "b"})
    assert type(sandbox) is BoundBoxSandbox
    settings, handlers = sandbox._connection.settings, sandbox._connection.channel.handlers
    assert (settings.limits, settings.cwd, settings.labels) == ("lite", "/tmp", {"a": "b"})
    assert settings.image == str(project / "docker/py.Dockerfile")
    assert isinstance(settings.egress, dict)
    assert settings.egress["allowed_hosts"] == ["api.github.com", "api.example.com"]
    assert list(handlers) == ["api.example.com"]


def test_a_class_that_is_defined_again_counts_once(project: Path) -> None:
    (project / "smokebox.toml").write_text('[sandboxes.Twice]\nclass_name = "TwiceSandbox"\n')
    first = type("TwiceSandbox", (Sandbox,), {"__module__": "reloaded"})
    second = type("TwiceSandbox", (Sandbox,), {"__module__": "reloaded"})
    assert type(get_sandbox(env.Twice, "a")) is second is not first
    other = type("TwiceSandbox", (Sandbox,), {"__module__": "other"})
    with pytest.raises(InvalidOption, match="the modules reloaded, other have a class"):
        get_sandbox(env.Twice, "a")
    assert other is not second


def test_a_class_that_is_not_defined_is_named(project: Path) -> None:
    (project / "smokebox.toml").write_text('[sandboxes.Lost]\nclass_name = "LostSandbox"\n')
    with pytest.raises(InvalidOption, match=r"smokebox\.toml: no class 'LostSandbox' is defined"):
        get_sandbox(env.Lost, "a")
