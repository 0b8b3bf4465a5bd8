"""Builds of one tenant against what another has built and uploaded."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from building import BASE, build, build_base
from smokebox.engine.host import Host
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.errors import BuildFailed, NotFound
from smokebox.wire.builds import ContextEntry

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "the-content-of-the-victim"


async def test_a_tenant_reaches_nothing_of_another(tmp_path: Path) -> None:
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await build_base(host)
        text = f"FROM {BASE}\nCOPY f /f\nRUN --mount=type=cache,target=/c cp /f /c/f\n"
        victim = await build(host, text, {"f": SECRET}, names=("private:1",), scope="victim-")
        digest = hashlib.sha256(SECRET.encode()).hexdigest()
        stolen = ContextEntry(path="f", type="file", size=len(SECRET), digest=digest)
        assert host.builds.content.missing([digest], scope="attacker-") == [digest]
        for attack in (
            "FROM private:1\nRUN cat /f",
            f"FROM {victim.digest}\nRUN cat /f",
            f"FROM {BASE}\nCOPY --from=private:1 /f /f\nRUN cat /f",
            f"FROM {BASE}\nCOPY f /f\nRUN cat /f",
            f"FROM {BASE}\nRUN --mount=source=f,target=/f cat /f",
            f"FROM {BASE}\nRUN --mount=type=cache,target=/c cat /c/f",
        ):
            request = BuildRequest(dockerfile=attack, entries=[stolen], scope="attacker-")
            output = ""
            with pytest.raises(BuildFailed) as caught:
                async for event in host.builds.run(request):
                    output += event.data
            assert SECRET not in output + str(caught.value), attack
        with pytest.raises(NotFound):
            await host.create("attacker-box", image=victim.digest)


@pytest.mark.parametrize("path", ["../f", "/etc/passwd", "a/../../f", "", "a//b", "./f"])
async def test_entries_lead_nowhere_outside_the_context(tmp_path: Path, path: str) -> None:
    async with await Host.open(tmp_path / "home", pool=0) as host:
        entry = ContextEntry(path=path, type="symlink", target="/")
        with pytest.raises(ValueError, match="not a path inside"):
            async for _ in host.builds.run(
                BuildRequest(dockerfile="FROM scratch", entries=[entry])
            ):
                pass


async def test_links_of_context_and_image_lead_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("canary")
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await build_base(host)
        link = ContextEntry(path="out", type="symlink", target=str(tmp_path))
        for attack in (
            "COPY out/canary /x",
            "COPY out /x",
            f"RUN ln -s {tmp_path} /l\nCOPY --from=0 /l/canary /x",
            f"RUN ln -s {tmp_path}/made /l\nRUN --mount=source=/,target=/l true\nCOPY l/x /x",
        ):
            text = f"FROM {BASE}\nFROM {BASE}\n{attack}\n"
            with pytest.raises(BuildFailed, match="does not exist"):
                async for _ in host.builds.run(BuildRequest(dockerfile=text, entries=[link])):
                    pass
        built = await build(host, f"FROM {BASE}\nRUN ln -s {tmp_path} /l\nCOPY <<E /l/new\nx\nE\n")
        assert built.digest
    assert sorted(one.name for one in tmp_path.iterdir()) == ["canary", "home"]
