"""Builds through a server: uploaded contexts, progress, errors, and images of sandboxes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from client.server_process import server_process
from smokebox import Image, env
from smokebox.client.build_context import read_context
from smokebox.errors import BuildFailed, InvalidDockerfile, InvalidOption, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.client.client import Client
    from smokebox.client.image_builds import ImageBuilds


def write(folder: Path, **files: str) -> Path:
    """Write files; `__` in a name is a dot, and `_s_` a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", ".").replace("_s_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def paths(folder: Path, file: Path | None = None) -> list[str]:
    """Return the paths of the files in a context."""
    found = read_context(folder, file=file)
    return [one.path for one in found.entries if one.type == "file"]


def test_a_context_excludes_what_dockerignore_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        Dockerfile="FROM x",
        __dockerignore="*.log\nbuild\n!build/keep.txt\n**/*.tmp\n# comment\n",
        a__log="",
        sub_s_b__log="",
        sub_s_c__tmp="",
        build_s_out__txt="",
        build_s_keep__txt="",
    )
    assert paths(tmp_path) == [".dockerignore", "Dockerfile", "build/keep.txt", "sub/b.log"]


def test_the_rules_beside_a_dockerfile_come_first(tmp_path: Path) -> None:
    write(tmp_path, __dockerignore="*", x__txt="", d_s_my__Dockerfile="FROM x")
    file = tmp_path / "d" / "my.Dockerfile"
    (tmp_path / "d" / "my.Dockerfile.dockerignore").write_text("d\n.*")
    assert paths(tmp_path, file) == ["x.txt"]


def test_a_context_keeps_modes_links_and_times_and_hashes_content(tmp_path: Path) -> None:
    write(tmp_path, Dockerfile="FROM x", run__sh="hi")
    os.chmod(tmp_path / "run.sh", 0o750)
    os.utime(tmp_path / "run.sh", ns=(0, 5_000_000_123))
    (tmp_path / "link").symlink_to("run.sh")
    os.mkfifo(tmp_path / "pipe")
    found = {one.path: one for one in read_context(tmp_path).entries}
    assert (found["run.sh"].mode, found["run.sh"].mtime_ns) == (0o750, 5_000_000_123)
    assert found["link"].target == "run.sh"
    assert "pipe" not in found


def test_a_dockerfile_by_its_path_has_its_directory_as_context(tmp_path: Path) -> None:
    write(tmp_path, py__Dockerfile="FROM x", a__txt="")
    found = read_context(tmp_path / "py.Dockerfile")
    assert (found.dockerfile, found.file) == ("FROM x", "py.Dockerfile")
    assert [one.path for one in found.entries] == ["a.txt", "py.Dockerfile"]


def test_a_missing_dockerfile_and_a_bad_pattern_are_named(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="Dockerfile"):
        read_context(tmp_path)
    write(tmp_path, Dockerfile="FROM x", __dockerignore="a[")
    with pytest.raises(InvalidOption, match="dockerignore"):
        read_context(tmp_path)


async def test_builds_with_progress_and_uploads_only_what_is_missing(
    client: Client, tmp_path: Path
) -> None:
    write(tmp_path, Dockerfile="FROM host\nCOPY a.txt /a\nRUN cat /a\n", a__txt=os.urandom(9).hex())
    async with client:
        context = read_context(tmp_path)
        assert await client.builds.upload(context) == len(context.contents)
        assert await client.builds.upload(context) == 0
        events = [event async for event in client.builds.stream(tmp_path, names=["built:1"])]
        output = "".join(event.data for event in events if event.kind == "output")
        assert output == (tmp_path / "a.txt").read_text()
        async with await client.create(image="built:1") as sandbox:
            assert (await sandbox.exec("cat /a")).stdout == output


async def test_a_failed_build_arrives_with_its_place_and_output(
    client: Client, tmp_path: Path
) -> None:
    write(tmp_path, Dockerfile="FROM host\nRUN echo told; exit 4\n")
    async with client:
        with pytest.raises(BuildFailed) as caught:
            await client.builds.build(tmp_path)
        assert (caught.value.line, caught.value.exit_code) == (2, 4)
        assert caught.value.output == "told\n"
        write(tmp_path, Dockerfile="FROM host\nRUM x\n")
        with pytest.raises(InvalidDockerfile, match="Did you mean RUN"):
            await client.builds.build(tmp_path)


async def test_a_sandbox_starts_from_a_dockerfile(client: Client, tmp_path: Path) -> None:
    write(tmp_path, py__Dockerfile="FROM host\nENV who=me\nWORKDIR /srv/x\nCOPY a /a\n", a="1")
    async with client, await client.create(image=str(tmp_path / "py.Dockerfile")) as sandbox:
        assert (await sandbox.exec("echo $who; pwd; cat /a")).stdout == "me\n/srv/x\n1"


async def test_a_sandbox_starts_from_an_image_declared_in_python(
    client: Client, tmp_path: Path
) -> None:
    write(tmp_path, data_s_f="from a directory\n", one="from a file\n")
    image = (
        Image.host()
        .env(quoted='a "b" $c')
        .workdir("/made")
        .copy(tmp_path / "data", "/data/")
        .copy(tmp_path / "one", "/one")
        .run("cat /data/f /one > both", ["touch", "a b"])
        .run("echo 'first\nsecond' >> both")
    )
    async with client:
        async with await client.create(image=image) as sandbox:
            shown = await sandbox.exec('cat both; ls; echo "$quoted"')
            assert shown.stdout == (
                'from a directory\nfrom a file\nfirst\nsecond\na b\nboth\na "b" $c\n'
            )
        again = [event async for event in client.builds.stream(image.context())]
        assert all(event.cached for event in again if event.kind == "done")


def test_an_image_is_the_text_of_a_dockerfile(tmp_path: Path) -> None:
    write(tmp_path, Dockerfile="FROM debian:12\nUSER app\n")
    base = Image.from_dockerfile(tmp_path)
    image = (
        base.apt_install("ffmpeg").pip_install("pandas>=2", "x[y]").npm_install("@a/b").user("r")
    )
    assert base.dockerfile == "FROM debian:12\nUSER app\n"
    assert image.dockerfile.splitlines()[2:] == [
        "RUN apt-get update && apt-get install -y --no-install-recommends ffmpeg && "
        "rm -rf /var/lib/apt/lists/*",
        "RUN python3 -m pip install --no-cache-dir --break-system-packages 'pandas>=2' 'x[y]'",
        "RUN npm install --global @a/b",
        "USER r",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image.from_registry("a b"),
        lambda: Image.host().apt_install(),
        lambda: Image.host().apt_install("a; rm -rf /"),
        lambda: Image.host().pip_install("a\nRUN x"),
        lambda: Image.host().env(a="1\n2"),
        lambda: Image.host().workdir("/a\nRUN x"),
        lambda: Image.host().run(""),
    ],
)
def test_an_image_refuses_what_would_be_another_instruction(make: object) -> None:
    with pytest.raises(InvalidOption):
        make()  # type: ignore[operator]


INDEX = "http://mirror.test/simple"


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Client]:
    """Return a client of a server whose host has a package mirror."""
    with server_process(str(tmp_path / "home"), {"PIP_INDEX_URL": INDEX}) as server:
        yield server.client()


async def test_a_sandbox_is_built_with_the_mirrors_of_the_host_on_request(
    mirrored: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path / "project"
    write(tmp_path, Dockerfile='FROM host\nRUN echo "index $PIP_INDEX_URL" > /index\n')
    toml = '[sandboxes.With]\nimage = "./Dockerfile"\nmirrors = true\n'
    write(tmp_path, smokebox__toml=toml)
    monkeypatch.chdir(tmp_path)
    async with mirrored as client:
        async with await client.create(env.With) as bound:
            assert (await bound.exec("cat /index")).stdout == f"index {INDEX}\n"
            # They are for the build.
            assert (await bound.exec("echo $PIP_INDEX_URL")).stdout == "\n"
        write(tmp_path, Dockerfile='FROM host\nRUN echo "none $PIP_INDEX_URL" > /index\n')
        async with await client.create(env.With, mirrors=False) as plain:
            assert (await plain.exec("cat /index")).stdout == "none \n"
        image = Image.host().run('echo "declared $PIP_INDEX_URL" > /index')
        async with await client.create(image=image, mirrors=True) as declared:
            assert (await declared.exec("cat /index")).stdout == f"declared {INDEX}\n"


def test_mirrors_is_no_text(client: Client) -> None:
    with pytest.raises(InvalidOption, match="mirrors"):
        client.sandbox("box", mirrors="yes")  # type: ignore[call-overload]


async def test_unknown_options_name_the_nearest(client: Client, tmp_path: Path) -> None:
    builds: ImageBuilds = client.builds
    with pytest.raises(InvalidOption, match="build_args"):
        await builds.build(tmp_path, build_arg={})  # type: ignore[call-arg]
