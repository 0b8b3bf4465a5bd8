"""Working directory and user that an image sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.engine.host import Host
from smokebox.engine.images.store import ImageStore

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.images.image import Image


@pytest.fixture(autouse=True)
def use_configured_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all images the cwd /srv/app and the user nobody."""
    get = ImageStore.get

    async def get_configured(store: ImageStore, name: str, **options: Any) -> Image:
        image = await get(store, name, **options)
        return replace(image, config=replace(image.config, cwd="/srv/app", user="nobody"))

    monkeypatch.setattr(ImageStore, "get", get_configured)


async def test_commands_and_sessions_start_in_the_cwd_of_the_image(host: Host) -> None:
    sandbox = host.sandbox("box")
    assert (await sandbox.exec("pwd; id -un")).stdout == "/srv/app\nnobody\n"
    session = await sandbox.create_session()
    assert (await session.exec("pwd; id -un")).stdout == "/srv/app\nnobody\n"
    assert (sandbox.cwd, sandbox.resolve_path("a")) == ("/srv/app", "/srv/app/a")


async def test_relative_paths_start_at_the_cwd_of_the_image(host: Host) -> None:
    sandbox = host.sandbox("box")
    await sandbox.write_file("a", "1")
    assert await sandbox.readdir("/srv/app") == ["a"]
    assert await sandbox.glob("*") == ["/srv/app/a"]
    assert await sandbox.readdir("/workspace") == []


async def test_options_of_the_caller_override_the_image(host: Host) -> None:
    sandbox = host.sandbox("box", cwd="/workspace", user="root")
    await sandbox.write_file("a", "1")
    assert (await sandbox.exec("pwd; id -un; ls")).stdout == "/workspace\nroot\na\n"
    assert sandbox.cwd == "/workspace"


async def test_settings_survive_sleep_but_not_destroy(tmp_path: Path, layers: Path) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as first:
        await first.sandbox("box").wake()
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as second:
        sandbox = second.sandbox("box")
        assert sandbox.cwd == "/srv/app"
        assert (await sandbox.exec("pwd; id -un")).stdout == "/srv/app\nnobody\n"
        await sandbox.destroy()
        assert sandbox.cwd == "/workspace"
        await sandbox.write_file("b", "2")
        assert await sandbox.exists("/srv/app/b")
