"""Exported images, read by skopeo and umoci and by ourselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from building import BASE, build, read_tree, tree
from smokebox.engine.images.build.oci_export import export_oci
from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host

TEXT = f"""
FROM {BASE}
LABEL a=1
COPY --chown=app:team f /srv/f
RUN rm -rf /usr/lib && mkdir /usr/lib && echo x > /usr/lib/again
RUN rm /var/link; chmod 4755 /srv/f
CMD ["sh"]
"""

needs_tools = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("skopeo") and shutil.which("umoci")),
    reason="skopeo and umoci, and root to keep owners",
)


@needs_tools
async def test_other_tools_read_the_tree_and_the_config(based: Host, tmp_path: Path) -> None:
    built = await build(based, TEXT, {"f": "content"})
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    layout, bundle = tmp_path / "layout", tmp_path / "bundle"
    await export_oci(based.builds.catalog, image, str(layout), name="one")
    shown = subprocess.run(
        ["skopeo", "inspect", f"oci:{layout}:one"], capture_output=True, check=True
    )
    assert json.loads(shown.stdout)["Labels"] == {"a": "1"}
    subprocess.run(
        ["umoci", "unpack", "--image", f"{layout}:one", str(bundle)],
        capture_output=True,
        check=True,
    )
    top = os.open(bundle / "rootfs", os.O_RDONLY | os.O_DIRECTORY)
    theirs = read_tree(top, 0, skip=True)
    os.close(top)
    assert theirs == await tree(based, built.digest)


async def test_an_exported_image_can_be_loaded_again(based: Host, tmp_path: Path) -> None:
    built = await build(based, TEXT, {"f": "content"})
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    await export_oci(based.builds.catalog, image, str(tmp_path / "layout"))
    loaded = await based.images.load_oci(tmp_path / "layout", names=["again:1"])
    assert await tree(based, loaded.digest) == await tree(based, built.digest)
    assert loaded.config.cmd == ("sh",)


async def test_refuses_to_export_what_is_on_top_of_this_host(based: Host, tmp_path: Path) -> None:
    built = await build(based, "FROM host\nRUN touch /made")
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    with pytest.raises(Unsupported, match="'host'"):
        await export_oci(based.builds.catalog, image, str(tmp_path / "layout"))
    assert not (tmp_path / "layout").exists()
