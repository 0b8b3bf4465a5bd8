"""The cache of builds: what is a hit, what is a miss, and who shares what."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from building import BASE, Entry, build

if TYPE_CHECKING:
    from smokebox.engine.host import Host

TEXT = f"""FROM {BASE}
ARG version=1
COPY a.txt /a
RUN cat /a
"""
FILES = {"a.txt": Entry(b"a")}


async def test_takes_every_step_from_the_cache_the_second_time(based: Host) -> None:
    first = await build(based, TEXT, FILES)
    again = await build(based, TEXT, FILES)
    assert first.ran == ["COPY a.txt /a", "RUN cat /a"]
    assert again.ran == []
    assert again.digest == first.digest


@pytest.mark.parametrize(
    ("files", "text", "args", "ran"),
    [
        ({"a.txt": Entry(b"a", mtime=1)}, TEXT, {}, 0),
        ({"a.txt": Entry(b"a"), "b.txt": "unused"}, TEXT, {}, 0),
        (FILES, "# a comment\n" + TEXT, {}, 0),
        ({"a.txt": Entry(b"b")}, TEXT, {}, 2),
        ({"a.txt": Entry(b"a", mode=0o755)}, TEXT, {}, 2),
        (FILES, TEXT, {"version": "2"}, 1),
        (FILES, TEXT, {"HTTP_PROXY": "http://p"}, 0),
        (FILES, TEXT.replace("cat /a", "cat  /a"), {}, 1),
        (FILES, TEXT.replace("/a", "/b"), {}, 2),
    ],
)
async def test_runs_again_what_depends_on_a_change(
    based: Host, files: dict[str, Entry | str], text: str, args: dict[str, str], ran: int
) -> None:
    await build(based, TEXT, FILES)
    again = await build(based, text, files, build_args=args)
    assert len(again.ran) == ran


async def test_runs_every_step_without_the_cache(based: Host) -> None:
    await build(based, TEXT, FILES)
    assert len((await build(based, TEXT, FILES, no_cache=True)).ran) == 2


async def test_runs_a_step_once_for_builds_at_the_same_time(based: Host) -> None:
    text = f"FROM {BASE}\nRUN sleep 0.5; cat /proc/sys/kernel/random/uuid > /id\n"
    first, second = await asyncio.gather(build(based, text), build(based, text))
    assert first.digest == second.digest
    assert len(first.ran) + len(second.ran) == 1


async def test_keeps_the_caches_of_scopes_apart(based: Host) -> None:
    text = f"FROM {BASE}\nRUN --mount=type=cache,target=/c ls /c; echo x >> /c/x\n"
    first = await build(based, text, scope="a-")
    other = await build(based, text, scope="b-")
    same = await build(based, text + "RUN --mount=type=cache,target=/c cat /c/x", scope="a-")
    assert (first.output, other.output, same.output) == ("", "", "x\n")
    assert len(other.ran) == 1
    assert len(same.ran) == 1


async def test_keeps_cache_mounts_out_of_layers(based: Host) -> None:
    built = await build(
        based, f"FROM {BASE}\nRUN --mount=type=cache,target=/deep/c echo x > /deep/c/x"
    )
    base = await based.builds.catalog.find(BASE)
    image = await based.builds.catalog.get(built.digest)
    assert base is not None
    assert image is not None
    assert image.layers == base.layers


async def test_keeps_a_cache_mount_when_its_command_fails(based: Host) -> None:
    mount = "RUN --mount=type=cache,id=c,target=/c"
    with pytest.raises(Exception, match="exit code 1"):
        await build(based, f"FROM {BASE}\n{mount} echo x > /c/x; false")
    built = await build(based, f"FROM {BASE}\n{mount} cat /c/x")
    assert built.output == "x\n"


async def test_passes_secrets_to_commands_only(based: Host, tmp_path: object) -> None:
    secrets = {"token": b"very-secret-value", "other": b"second-secret"}
    built = await build(
        based,
        f"""
        FROM {BASE}
        RUN --mount=type=secret,id=token,mode=0444 cat /run/secrets/token
        RUN --mount=type=secret,id=other,target=/root/.netrc cat /root/.netrc; touch /root/kept
        RUN --mount=type=secret,id=token,env=TOKEN echo $TOKEN
        RUN ls -A /root /run; test -z "$TOKEN"
        """,
        secrets=secrets,
    )
    assert built.output.startswith("very-secret-valuesecond-secretvery-secret-value\n")
    assert ".netrc" not in built.output
    assert "kept" in built.output
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    assert "secret-value" not in repr(image)
    for folder, _, names in os.walk(based.home):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    assert b"very-secret-value" not in file.read(), path


async def test_refuses_a_required_secret_that_is_missing(based: Host) -> None:
    text = f"FROM {BASE}\nRUN --mount=type=secret,id=x,required true"
    with pytest.raises(Exception, match="'x' is required"):
        await build(based, text)


async def test_mounts_context_and_stages_without_keeping_them(based: Host) -> None:
    files = {"a.txt": "a", "dir/b.txt": "b"}
    built = await build(
        based,
        f"""
        FROM {BASE} AS made
        RUN mkdir /out && echo made > /out/file
        FROM {BASE}
        WORKDIR /app
        RUN --mount=type=bind,source=a.txt,target=a.txt --mount=source=dir,target=/dir \\
            --mount=from=made,source=/out,target=/in --mount=type=tmpfs,target=/scratch \\
            cat a.txt /dir/b.txt /in/file && touch /scratch/x /dir/x
        RUN ls -A /app /; ls /scratch /dir /in
        """.replace("/scratch /dir /in\n", "/scratch /dir /in || true\n"),
        files,
    )
    assert built.output.startswith("abmade\n")
    assert "scratch" not in built.output.partition("abmade\n")[2].partition("ls:")[0]
    touched = {**files, "a.txt": "changed"}
    again = await build(based, f"FROM {BASE}\nRUN --mount=source=a.txt,target=/x cat /x", touched)
    assert again.output == "changed"


async def test_forgets_a_step_whose_layer_is_gone(based: Host) -> None:
    first = await build(based, TEXT, FILES)
    image = await based.builds.catalog.get(first.digest)
    assert image is not None
    await based.builds.cache.clear("")
    assert len((await build(based, TEXT, FILES)).ran) == 2
    assert replace(image) == image


async def test_a_stage_that_comes_out_the_same_invalidates_nothing(based: Host) -> None:
    text = f"""
    FROM {BASE} AS made
    RUN mkdir /out && echo 1 > /out/x
    FROM {BASE}
    COPY --from=made /out /in
    RUN cat /in/x
    """
    first = await build(based, text)
    same = await build(based, text.replace("echo 1", "echo  1"))
    again = await build(based, text.replace("echo 1", "echo  1"))
    other = await build(based, text.replace("echo 1", "echo 2"))
    assert [len(one.ran) for one in (first, same, again, other)] == [3, 1, 0, 3]
    assert same.digest == again.digest
