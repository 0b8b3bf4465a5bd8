"""Builds of Dockerfiles: files, users, variables, heredocs and stages, as BuildKit defines them."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from building import BASE, Entry, build, sha, status_of, tree
from smokebox.errors import BuildFailed, InvalidDockerfile

if TYPE_CHECKING:
    from smokebox.engine.host import Host


async def test_runs_commands_with_env_directory_and_shell(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE}
        ARG who=world
        ENV greeting=hello
        WORKDIR /app
        RUN echo $greeting $who > said && pwd
        SHELL ["/bin/sh", "-ec"]
        RUN echo $0 && cat said
        RUN ["/bin/echo", "$greeting"]
        """,
    )
    assert built.output == "/app\n/bin/sh\nhello world\n$greeting\n"
    assert (await tree(based, built.digest))["app/said"][4] == sha("hello world\n")


async def test_runs_heredocs(based: Host) -> None:
    built = await build(
        based,
        f"""
FROM {BASE}
ENV name=x
RUN <<EOF
echo one $name
echo two
EOF
RUN <<-'EOF'
	echo three
	EOF
RUN <<EOF
#!/bin/cat
shown
EOF
RUN cat <<A - && cat <<B
a
A
b
B
""",
    )
    assert built.output == "one x\ntwo\nthree\n#!/bin/cat\nshown\na\nb\n"


async def test_copies_heredocs_into_files(based: Host) -> None:
    built = await build(
        based,
        f"""
FROM {BASE}
ENV x=1
COPY <<a.txt <<'b.txt' /d/
$x "quoted"
a.txt
$x
b.txt
COPY --chmod=0700 --chown=app:team <<EOF /run.sh
#!/bin/sh
EOF
""",
    )
    found = await tree(based, built.digest)
    assert found["d/a.txt"][4] == sha('1 "quoted"\n')
    assert found["d/b.txt"][4] == sha("$x\n")
    assert status_of(found, "run.sh") == ("0o700", 1000, 2000)


FILES: dict[str, str | bytes | Entry] = {
    "a.txt": "a",
    "b.txt": Entry(b"b", mode=0o600),
    "dir/one": "1",
    "dir/sub/two": Entry(b"2", mode=0o755),
    "dir/sub": Entry(directory=True, mode=0o700),
    "link": Entry(target="dir"),
    "dir/inner": Entry(target="../a.txt"),
}


async def test_copies_files_and_directories_by_the_rules_of_destinations(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE}
        WORKDIR /w
        COPY a.txt renamed
        COPY a.txt b.txt into/
        COPY dir content
        COPY *.txt globbed/
        COPY link followed
        COPY a.txt /srv
        COPY a.txt /var/link/through
        COPY none*.txt nothing/
        COPY ../../a.txt climbed
        """,
        FILES,
    )
    found = await tree(based, built.digest)
    expected = {
        "w/renamed": ("0o644", 0, 0),
        "w/into": ("0o755", 0, 0),
        "w/into/b.txt": ("0o600", 0, 0),
        "w/content": ("0o755", 0, 0),
        "w/content/one": ("0o644", 0, 0),
        "w/content/sub": ("0o700", 0, 0),
        "w/content/sub/two": ("0o755", 0, 0),
        "w/globbed/a.txt": ("0o644", 0, 0),
        "w/globbed/b.txt": ("0o600", 0, 0),
        "w/followed/one": ("0o644", 0, 0),
        "srv/a.txt": ("0o644", 0, 0),
        "srv/through": ("0o644", 0, 0),
        "w/climbed": ("0o644", 0, 0),
    }
    assert {path: status_of(found, path) for path in expected} == expected
    assert found["w/content/inner"][4] == b"../a.txt"
    assert "w/nothing" not in found


async def test_copies_with_owner_mode_parents_and_excludes(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE}
        COPY --chown=app dir /owned/below
        COPY --chown=7 a.txt /seven
        COPY --chmod=751 dir /moded
        COPY --parents dir/sub/two a.txt /kept/
        COPY --parents dir/./sub/two /pivot/
        COPY --exclude=sub --exclude=in* dir /some
        """,
        FILES,
    )
    found = await tree(based, built.digest)
    assert status_of(found, "owned") == ("0o755", 1000, 1001)
    assert status_of(found, "owned/below/one") == ("0o644", 1000, 1001)
    assert status_of(found, "seven") == ("0o644", 7, 7)
    assert status_of(found, "moded/one") == ("0o751", 0, 0)
    assert status_of(found, "moded/sub") == ("0o751", 0, 0)
    assert "kept/dir/sub/two" in found
    assert "kept/a.txt" in found
    assert "pivot/sub/two" in found
    assert sorted(path for path in found if path.startswith("some")) == ["some", "some/one"]


async def test_gives_a_new_working_directory_to_the_user(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE}
        USER app
        WORKDIR /made/deep
        WORKDIR /home
        RUN id -un && touch /made/deep/mine
        """,
    )
    found = await tree(based, built.digest)
    assert built.output == "app\n"
    assert status_of(found, "made") == status_of(found, "made/deep") == ("0o755", 1000, 1001)
    assert status_of(found, "home") == ("0o755", 0, 0)
    assert status_of(found, "made/deep/mine")[1:] == (1000, 1001)


def archive(kind: str) -> bytes:
    """Return an archive with a directory, a file of user 5 and a symlink."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}") as tar:  # type: ignore[call-overload]
        info = tarfile.TarInfo("in/file")
        info.size, info.mode, info.uid, info.gid = 3, 0o640, 5, 6
        tar.addfile(info, io.BytesIO(b"abc"))
        info = tarfile.TarInfo("in/link")
        info.type, info.linkname = tarfile.SYMTYPE, "file"
        tar.addfile(info)
        info = tarfile.TarInfo("in/null")
        info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
        tar.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz"])
async def test_unpacks_archives_that_add_takes(based: Host, kind: str) -> None:
    built = await build(based, f"FROM {BASE}\nADD x /out\nCOPY x /copied", {"x": archive(kind)})
    found = await tree(based, built.digest)
    assert status_of(found, "out/in/file") == ("0o640", 5, 6)
    assert found["out/in/link"][4] == b"file"
    assert "out/in/null" not in found
    assert found["copied"][4]


async def test_builds_only_the_stages_that_the_target_needs(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE} AS made
        RUN mkdir /out && echo x > /out/x && chown 3:4 /out/x
        FROM {BASE} AS broken
        RUN false
        FROM scratch
        COPY --from=made /out /
        COPY --from={BASE} /etc/passwd /passwd
        """,
    )
    found = await tree(based, built.digest)
    assert status_of(found, "x") == ("0o644", 3, 4)
    assert set(found) == {"x", "passwd", "etc"} or set(found) == {"x", "passwd"}


async def test_runs_the_triggers_of_its_base(based: Host) -> None:
    await build(
        based, f"FROM {BASE}\nONBUILD COPY a.txt /a\nONBUILD RUN cat /a", names=("onbuild:1",)
    )
    built = await build(based, "FROM onbuild:1\nRUN echo own", FILES)
    assert built.output == "aown\n"
    again = await build(based, f"FROM {BASE}\nRUN test ! -e /a")
    assert again.digest


async def test_records_the_configuration(based: Host) -> None:
    built = await build(
        based,
        f"""
        FROM {BASE}
        ENTRYPOINT ["/bin/echo"]
        CMD hello
        EXPOSE 80 5000-5001/udp
        LABEL a=1 b="2 3"
        VOLUME /data
        STOPSIGNAL SIGINT
        HEALTHCHECK --interval=5s CMD true
        USER app:team
        WORKDIR /x
        MAINTAINER me
        """,
    )
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    config = image.config
    assert config.entrypoint == ("/bin/echo",)
    assert config.cmd == ("/bin/sh", "-c", "hello")
    assert set(config.exposed_ports) == {"80/tcp", "5000/udp", "5001/udp"}
    assert config.labels == {"a": "1", "b": "2 3"}
    assert (config.volumes, config.stop_signal) == (("/data",), "SIGINT")
    assert config.healthcheck is not None
    assert config.healthcheck.test == ("CMD-SHELL", "true")
    assert (config.user, config.cwd, config.author) == ("app:team", "/x", "me")


async def test_keeps_generated_files_out_of_layers(based: Host) -> None:
    built = await build(
        based, f"FROM {BASE}\nRUN echo 1.2.3.4 x >> /etc/hosts; echo y > /etc/resolv.conf"
    )
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    base = await based.builds.catalog.find(BASE)
    assert base is not None
    assert image.layers == base.layers


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("COPY missing /x", "'missing' does not exist"),
        ("COPY --chown=nobody-here a.txt /x", "nobody-here"),
        ("COPY --from=missing:1 / /", "missing:1"),
        ("USER ghost\nRUN true", "ghost"),
    ],
)
async def test_names_the_instruction_that_failed(based: Host, line: str, message: str) -> None:
    with pytest.raises(BuildFailed, match=message) as caught:
        await build(based, f"FROM {BASE}\n{line}", FILES)
    assert str(caught.value).startswith("Dockerfile:")
    assert caught.value.hint


async def test_reports_output_and_exit_code_of_a_failed_command(based: Host) -> None:
    with pytest.raises(BuildFailed) as caught:
        await build(based, f"FROM {BASE}\nENV a=1\nRUN echo told >&2; exit 3")
    error = caught.value
    assert (error.line, error.exit_code, error.output) == (3, 3, "told\n")
    assert error.instruction == "RUN echo told >&2; exit 3"
    assert error.sandbox is None


async def test_refuses_several_sources_without_a_directory(based: Host) -> None:
    with pytest.raises(InvalidDockerfile, match="Dockerfile:2"):
        await build(based, f"FROM {BASE}\nCOPY a.txt b.txt /x", FILES)


async def test_warns_of_arguments_that_nothing_declares(based: Host) -> None:
    built = await build(based, f"FROM {BASE}", build_args={"X": "1"})
    assert built.warnings == ["no ARG declares these build arguments: X"]
