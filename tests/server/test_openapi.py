"""The OpenAPI document: valid and complete."""

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

    from smokebox.server.endpoint import ApiEndpoint

DOCUMENT = make_document(all_endpoints(), all_sockets())


def _operation(endpoint: ApiEndpoint) -> dict[str, Any]:
    operation: dict[str, Any] = DOCUMENT["paths"][API + endpoint.path][endpoint.method.lower()]
    return operation


def test_document_is_valid_openapi() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_every_reference_resolves_to_a_schema() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    names = set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text))
    assert names
    assert names <= DOCUMENT["components"]["schemas"].keys()


@pytest.mark.parametrize(
    "endpoint", all_endpoints(), ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)
def test_every_endpoint_is_documented(endpoint: ApiEndpoint) -> None:
    operation = _operation(endpoint)
    assert operation["summary"]
    assert str(endpoint.status) in operation["responses"]
    in_path = {field["name"] for field in operation["parameters"] if field["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", endpoint.path))
    if not endpoint.public:
        assert {"401", "403", "429", "500", "503"} <= operation["responses"].keys()
    assert ("requestBody" in operation) == (
        endpoint.body is not None or "json" not in endpoint.accepts
    )


def test_operation_ids_are_unique() -> None:
    names = [endpoint.name for endpoint in all_endpoints()]
    assert len(set(names)) == len(names)


def test_every_websocket_is_documented() -> None:
    assert DOCUMENT["x-websockets"].keys() == {API + socket.path for socket in all_sockets()}
    for socket in DOCUMENT["x-websockets"].values():
        assert socket["summary"]
        assert socket["description"]


async def test_document_and_page_are_served(http: aiohttp.ClientSession) -> None:
    async with http.get("/api/openapi.json") as response:
        assert response.headers["content-type"] == "application/json"
        assert await response.json() == msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    async with http.get("/api/docs") as response:
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        page = await response.text()
    assert "<script" not in page
    assert "/api/sandboxes/{id}/exec" in page
