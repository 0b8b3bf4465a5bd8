"""The OpenAPI document of the bridge protocol, made from its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox import __version__
from smokebox.server.compat.bridge.errors import BridgeErrorBody
from smokebox.server.compat.bridge.names import ID, SESSION
from smokebox.server.endpoint import JSON
from smokebox.server.openapi import SchemaSet, media_schema, path_parameters, status_title, tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.server.compat.bridge.route import BridgeRoute

_PARTS: dict[str, dict[str, Any]] = {
    "id": {"type": "string", "pattern": f"^{ID.pattern}$"},
    "sid": {"type": "string", "pattern": f"^{SESSION.pattern}$"},
    "path": {"type": "string"},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
}
# The request guard may respond with these to every request that needs a key.
_COMMON = (401, 429, 503)


def make_bridge_document(routes: Sequence[BridgeRoute]) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of these routes."""
    kinds = [kind for one in routes for kind in (one.body, one.response) if kind is not None]
    schemas = SchemaSet([BridgeErrorBody, *kinds])
    paths: dict[str, dict[str, Any]] = {}
    for one in routes:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Smokebox bridge",
            "version": __version__,
            "description": "The sandbox API that the OpenAI Agents SDK uses for Cloudflare.",
        },
        "security": [{"key": []}],
        "tags": tags(one.handler.__module__ for one in routes),
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas.components,
        },
    }


def _operation(one: BridgeRoute, path: str, schemas: SchemaSet) -> dict[str, Any]:
    parameters = [*path_parameters(path, _PARTS), *schemas.parameters(one.query)]
    if one.session:
        parameters.append({"name": "Session-Id", "in": "header", "schema": _PARTS["sid"]})
    error = {JSON: {"schema": schemas.of(BridgeErrorBody)}}
    errors = sorted({*one.errors, *(() if one.public else _COMMON)})
    operation: dict[str, Any] = {
        "operationId": one.operation,
        "tags": [one.handler.__module__.rpartition(".")[2]],
        "summary": one.summary,
        "parameters": parameters,
        "responses": {
            str(one.status): _response(one, schemas),
            **{str(code): {"description": status_title(code), "content": error} for code in errors},
        },
    }
    if one.description:
        operation["description"] = one.description
    if one.body is not None:
        operation["requestBody"] = {"content": {JSON: {"schema": schemas.of(one.body)}}}
    elif one.accepts != JSON:
        operation["requestBody"] = {"content": {one.accepts: media_schema(one.accepts)}}
    if one.public:
        operation["security"] = []
    return operation


def _response(one: BridgeRoute, schemas: SchemaSet) -> dict[str, Any]:
    response: dict[str, Any] = {"description": status_title(one.status)}
    if one.response is not None:
        response["content"] = {JSON: {"schema": schemas.of(one.response)}}
    elif one.returns != JSON:
        response["content"] = {one.returns: media_schema(one.returns)}
    return response
