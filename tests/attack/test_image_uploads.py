"""Images that a tenant uploads, against the images of others and the files of the host."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from engine.images.layer_tools import archive, file
from engine.images.oci_tools import MANIFEST, config_of, small_base
from smokebox.engine.host import Host
from smokebox.engine.images.uploaded_images import ImageUpload, UploadResult
from smokebox.errors import ImageError, SmokeboxError
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

SECRET = archive([file("secret", b"of the victim")])


def upload_of(
    layers: Sequence[bytes], *, scope: str, claimed: Sequence[bytes] | None = None, **options: Any
) -> ImageUpload:
    """Return the upload of a layout with layers, whose configuration claims others."""
    documents: dict[str, bytes] = {}

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        documents[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    blobs = [put(gzip.compress(one, 1, mtime=0), "application/x.tar+gzip") for one in layers]
    contents = {name: name.rpartition("/")[2] for name in documents}
    documents.clear()
    config = put(json.dumps(config_of(claimed or layers)).encode(), "config")
    manifest = put(json.dumps({"config": config, "layers": blobs}).encode(), MANIFEST)
    documents["index.json"] = json.dumps({"manifests": [manifest]}).encode()
    return ImageUpload(path="x", documents=documents, contents=contents, scope=scope, **options)


async def send(host: Host, layers: Sequence[bytes], scope: str) -> None:
    """Upload the contents of layers."""
    for layer in layers:
        data = gzip.compress(layer, 1, mtime=0)

        async def chunks(data: bytes = data) -> AsyncIterator[bytes]:
            yield data

        await host.builds.content.put(hashlib.sha256(data).hexdigest(), chunks(), scope=scope)


async def load(host: Host, upload: ImageUpload) -> UploadResult:
    """Load an image."""
    return await host.uploads.load(upload, progress=lambda _: None)


async def test_naming_a_layer_of_another_tenant_gives_nothing_of_it(tmp_path: Path) -> None:
    layers = [small_base(), SECRET]
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await send(host, layers, "victim-")
        victim = await load(host, upload_of(layers, scope="victim-", names=("private:1",)))
        assert victim.image is not None
        # The very documents of the victim, without its layers.
        stolen = await load(host, upload_of(layers, scope="attacker-"))
        assert (stolen.image, len(stolen.missing)) == (None, 2)
        # Other layers, whose configuration claims to be those.
        own = [archive([file(name, b"mine")]) for name in ("a", "b")]
        await send(host, own, "attacker-")
        with pytest.raises(ImageError):
            await load(host, upload_of(own, claimed=layers, scope="attacker-"))
        assert await host.images.list(scope="attacker-") == []
        for name in ("private:1", victim.image.digest):
            with pytest.raises(SmokeboxError):
                await host.create("attacker-box", image=name)
        found = await host.images.inspect(victim.image.digest, scope="victim-")
        assert found.names == ("private:1",)


async def test_names_in_an_upload_open_no_file_of_the_host(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("{}")
    async with await Host.open(tmp_path / "home", pool=0) as host:
        for name in (str(canary), f"../../../../../{canary}", "blobs/sha256/../../canary"):
            docker = json.dumps([{"Config": name, "Layers": [name]}]).encode()
            index = json.dumps({"manifests": [{"digest": f"sha256:{name}"}]}).encode()
            for documents in ({"manifest.json": docker}, {"index.json": index}):
                upload = ImageUpload(path=str(canary), documents=documents, contents={name: name})
                with pytest.raises(ImageError):
                    await load(host, upload)
        config = json.dumps(config_of([SECRET])).encode()
        docker = json.dumps([{"Config": "c", "Layers": ["l"]}]).encode()
        documents = {"manifest.json": docker, "c": config}
        for content in ("../../../canary", str(canary), "", "0" * 63):
            with pytest.raises(SmokeboxError, match="digest"):
                await load(
                    host, ImageUpload(path="x", documents=documents, contents={"l": content})
                )


async def test_a_tenant_neither_shares_nor_names_a_path_of_the_server(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    layout.mkdir()
    (layout / "index.json").write_text("{}")
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        key = await server.state.keys.create(CreateKey(name="t", prefix="tenant"))
        headers = {"authorization": f"Bearer {key.key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as session:
            share = {"image": "oci:x", "documents": {}, "share": True}
            async with session.post("/api/images/load", json=share) as response:
                assert response.status == 403
            for path in (f"oci:{layout}", f"archive:{layout}/index.json"):
                body = {"image": path}
                async with session.put("/api/sandboxes/tenant-box", json=body) as response:
                    assert (response.status, str(layout) in await response.text()) == (404, True)
                named = {"image": path, "documents": {}}
                async with session.post("/api/images/load", json=named) as response:
                    text = await response.text()
                    assert "has no manifest.json or index.json" in text
                reserved = {"image": "oci:x", "documents": {}, "names": ["host"]}
                async with session.post("/api/images/load", json=reserved) as response:
                    assert response.status == 400
