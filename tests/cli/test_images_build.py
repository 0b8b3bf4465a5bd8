"""`smokebox images build`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine.images.layer_tools import archive, file
from engine.images.oci_tools import docker_archive, small_base
from smokebox.engine.images.build.mirrors import read_mirrors

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine

DOCKERFILE = """\
FROM host
ARG word=none
COPY a.txt /a
RUN echo "$word $(cat /a)" && test -n "$word"
RUN --mount=type=secret,id=key wc -c < /run/secrets/key
"""


def test_builds_prints_progress_and_names_the_image(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "a.txt").write_text("file")
    (tmp_path / "key").write_text("1234")
    options = ["--build-arg", "word=said", "--secret", f"id=key,src={tmp_path}/key"]
    done = cli.run("images", "build", str(tmp_path), "-t", "cli:1", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sha256:")
    assert "[4/5]   said file\n" in done.stderr
    assert "[5/5]   4\n" in done.stderr
    again = cli.run("images", "build", str(tmp_path), "--progress", "json", *options)
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert all(one.get("cached") for one in events if one["kind"] == "done")
    assert events[-1]["digest"] == done.stdout.strip()
    shown = cli.run("once", "--image", "cli:1", "cat /a")
    assert shown.stdout == "file"


def test_a_failure_is_one_line_and_a_hint(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "my.Dockerfile").write_text("FROM host\nRUN echo shown; exit 3\n")
    done = cli.run("images", "build", str(tmp_path), "-f", str(tmp_path / "my.Dockerfile"))
    assert done.returncode == 1
    assert "shown" in done.stderr
    assert "my.Dockerfile:2: `RUN echo shown; exit 3`: ended with exit code 3" in done.stderr
    assert "--keep" in done.stderr


def test_a_secret_without_a_value_is_named(cli: CommandLine, tmp_path: Path) -> None:
    done = cli.run("images", "build", str(tmp_path), "--secret", "id=key,env=NOT_SET_HERE")
    assert done.returncode != 0
    assert "NOT_SET_HERE" in done.stderr


def test_a_failed_build_of_a_sandbox_shows_the_output_once(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM host\nRUN echo shown; exit 3\n")
    done = cli.run("once", "--image", str(tmp_path), "true")
    assert done.returncode == 1
    assert done.stderr.count("shown\n") == 1
    assert "Dockerfile:2: `RUN echo shown; exit 3`: ended with exit code 3" in done.stderr


def test_an_image_is_loaded_from_files_and_named(cli: CommandLine, tmp_path: Path) -> None:
    layers = [small_base(), archive([file("srv/x", b"loaded")])]
    (tmp_path / "app.tar").write_bytes(docker_archive({"a:1": layers, "b:1": layers}))
    source = f"archive:{tmp_path}/app.tar"
    done = cli.run("images", "load", source)
    assert (done.returncode, "archive:FILE:NAME" in done.stderr) == (1, True)
    digest = cli.output("images", "load", f"{source}:b:1", "-t", "loaded:1")
    assert digest.startswith("sha256:")
    assert cli.output("once", "--image", "loaded:1", "cat /srv/x") == "loaded"
    assert cli.output("once", "--image", f"{source}:a:1", "cat /srv/x") == "loaded"
    assert cli.output("once", "--image", digest.strip(), "cat /srv/x") == "loaded"


def test_the_image_of_a_sandbox_is_built_with_mirrors_on_request(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text('FROM host\nRUN echo "index: $PIP_INDEX_URL" > /index\n')
    shown = cli.run("once", "--image", str(tmp_path), "--mirrors", "cat /index").stdout
    assert shown == f"index: {read_mirrors().variables.get('PIP_INDEX_URL', '')}\n"
