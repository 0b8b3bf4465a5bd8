"""Attachments of a message: images for the model, other files for the workspace."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

import pytest

from app.site import project, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from app.site import Site

READER = """
from smokebox import create_agent
from smokebox.agents.messages import ImagePart
from smokebox.testing import ScriptedModel, call, last_returns, last_text

def reply(request):
    if returns := last_returns(request):
        return f"read: {returns[0].text}"
    images = [part for part in request.messages[-1].parts if isinstance(part, ImagePart)]
    if "data.csv" in last_text(request):
        return call("bash", command="cat attachments/data.csv")
    return f"images: {len(images)}"

agent = create_agent(model=ScriptedModel(then=reply))
"""
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serve(project(tmp_path / "p", agents__reader=READER)) as site:
        yield site


async def prompt(site: Site, *attachments: object) -> str:
    body = {"message": "look", "attachments": attachments}
    done = await site.post("/agents/reader/one?wait=result", body)
    return str(done.body["result"]["text"])


async def test_file_is_written_to_the_workspace_and_named_in_the_message(site: Site) -> None:
    file = {"name": "data.csv", "data": b64encode(b"a,b\n1,2\n").decode()}
    assert "1,2" in await prompt(site, file)


async def test_image_is_shown_to_the_model(site: Site) -> None:
    assert await prompt(site, {"name": "pixel.png", "data": PIXEL}) == "images: 1"


@pytest.mark.parametrize(
    "attachment",
    [
        {"name": "../x", "data": ""},
        {"name": "..", "data": ""},
        {"name": "", "data": ""},
        {"name": "a/b", "data": ""},
        {"name": "x", "data": "not base64"},
        {"name": "x"},
        "x",
    ],
)
async def test_invalid_attachment_is_refused(site: Site, attachment: object) -> None:
    found = await site.post("/agents/reader/one", {"message": "m", "attachments": [attachment]})
    assert (found.status, found.code) == (400, "invalid_option")
    assert "attachments" in found.body["error"]["message"]
