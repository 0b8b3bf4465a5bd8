"""`smokebox mount`, `mounts` and `unmount`, and a server that offers buckets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from smokebox.cli.foreground import offered_buckets
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine
    from smokebox.testing import SeaweedServer


@pytest.fixture
def credentials(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)


def test_bucket_is_mounted_listed_and_unmounted(
    cli: CommandLine, sandbox: str, seaweed: SeaweedServer, bucket_name: str, credentials: None
) -> None:
    options = ("--endpoint", seaweed.endpoint, "--read-only")
    assert cli.output("mount", sandbox, bucket_name, "/data", *options) == "/data\n"
    output = cli.output("mounts", sandbox)
    assert bucket_name in output
    assert "active, read-only" in output
    (one,) = json.loads(cli.output("mounts", sandbox, "--json"))
    assert (one["path"], one["bucket"], one["active"]) == ("/data", bucket_name, True)
    assert seaweed.secret_key not in output + cli.output("exec", sandbox, "env; cat /proc/mounts")
    cli.output("sleep", sandbox)
    assert "asleep" in cli.output("mounts", sandbox)
    assert cli.output("unmount", sandbox, "/data") == ""
    assert json.loads(cli.output("mounts", sandbox, "--json")) == []


def test_wrong_credentials_are_a_line_and_a_hint(
    cli: CommandLine,
    sandbox: str,
    seaweed: SeaweedServer,
    bucket_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    done = cli.run("mount", sandbox, bucket_name, "/data", "--endpoint", seaweed.endpoint)
    assert done.returncode != 0
    assert "refused these credentials" in done.stderr
    assert "Traceback" not in done.stderr


def test_server_offers_the_buckets_of_a_project(
    tmp_path: Path, seaweed: SeaweedServer, credentials: None
) -> None:
    with pytest.raises(InvalidOption, match="defines a bucket"):
        offered_buckets(str(tmp_path))
    (tmp_path / "smokebox.toml").write_text(
        f'[buckets.DATA]\nbucket = "data"\nprefix = "/a/"\nendpoint = "{seaweed.endpoint}"\n'
    )
    found = offered_buckets(str(tmp_path))["DATA"]
    assert (found.bucket, found.prefix, found.read_only) == ("data", "a", False)
    assert found.access.secret_key == seaweed.secret_key
    assert seaweed.secret_key not in repr(found)
