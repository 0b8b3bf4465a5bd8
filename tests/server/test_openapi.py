"""The OpenAPI document: whole, valid, and about every endpoint that there is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import schemathesis

from smokebox.server.openapi import make_document
from smokebox.server.routes import all_endpoints, all_sockets
from smokebox.wire import API

if TYPE_CHECKING:
    import aiohttp

    from smokebox.server.endpoint import Endpoint

DOCUMENT = make_document(all_endpoints(), all_sockets())


def _operation(one: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][API + one.path][one.method.lower()]
    return found


def test_the_document_is_valid_openapi() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_every_reference_leads_to_a_schema() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    names = set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text))
    assert names
    assert names <= DOCUMENT["components"]["schemas"].keys()


@pytest.mark.parametrize("one", all_endpoints(), ids=lambda one: f"{one.method} {one.path}")
def test_every_endpoint_is_described(one: Endpoint) -> None:
    operation = _operation(one)
    assert operation["summary"]
    assert str(one.status) in operation["responses"]
    in_path = {field["name"] for field in operation["parameters"] if field["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", one.path))
    if not one.public:
        assert {"401", "403", "429", "500", "503"} <= operation["responses"].keys()
    assert ("requestBody" in operation) == (one.body is not None or "json" not in one.accepts)


def test_every_endpoint_has_a_name_of_its_own() -> None:
    names = [one.name for one in all_endpoints()]
    assert len(set(names)) == len(names)


def test_sockets_are_described_beside_the_paths() -> None:
    assert DOCUMENT["x-websockets"].keys() == {API + one.path for one in all_sockets()}
    for one in DOCUMENT["x-websockets"].values():
        assert one["summary"]
        assert one["description"]


async def test_the_document_and_its_page_are_served(http: aiohttp.ClientSession) -> None:
    async with http.get("/api/openapi.json") as answer:
        assert answer.headers["content-type"] == "application/json"
        assert await answer.json() == msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    async with http.get("/api/docs") as answer:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page = await answer.text()
    assert "<script" not in page
    assert "/api/sandboxes/{id}/exec" in page
