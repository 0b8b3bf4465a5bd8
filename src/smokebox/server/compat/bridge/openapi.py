"""The OpenAPI document of the bridge protocol, generated from its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox import __version__
from smokebox.server.compat.bridge.errors import BridgeErrorBody
from smokebox.server.compat.bridge.names import ID, SESSION
from smokebox.server.endpoint import JSON
from smokebox.server.openapi import (
    SchemaSet,
    description_of,
    media_schema,
    path_parameters,
    status_title,
    summary_of,
    tag_of,
    tags,
)

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
    """Generate the OpenAPI 3.1 document of these routes."""
    types = [type for route in routes for type in (route.body, route.response) if type is not None]
    schemas = SchemaSet([BridgeErrorBody, *types])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Smokebox bridge",
            "version": __version__,
            "description": "The sandbox API that the OpenAI Agents SDK uses for Cloudflare.",
        },
        "security": [{"key": []}],
        "tags": tags(route.handler for route in routes),
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas.components,
        },
    }


def _operation(route: BridgeRoute, path: str, schemas: SchemaSet) -> dict[str, Any]:
    parameters = [*path_parameters(path, _PARTS), *schemas.parameters(route.query)]
    if route.session:
        parameters.append({"name": "Session-Id", "in": "header", "schema": _PARTS["sid"]})
    error = {JSON: {"schema": schemas.of(BridgeErrorBody)}}
    errors = sorted({*route.errors, *(() if route.public else _COMMON)})
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "tags": [tag_of(route.handler)],
        "summary": summary_of(route.handler),
        "parameters": parameters,
        "responses": {
            str(route.status): _response(route, schemas),
            **{str(code): {"description": status_title(code), "content": error} for code in errors},
        },
    }
    if description := description_of(route.handler):
        operation["description"] = description
    if route.body is not None:
        operation["requestBody"] = {"content": {JSON: {"schema": schemas.of(route.body)}}}
    elif route.accepts != JSON:
        operation["requestBody"] = {"content": {route.accepts: media_schema(route.accepts)}}
    if route.public:
        operation["security"] = []
    return operation


def _response(route: BridgeRoute, schemas: SchemaSet) -> dict[str, Any]:
    response: dict[str, Any] = {"description": status_title(route.status)}
    if route.response is not None:
        response["content"] = {JSON: {"schema": schemas.of(route.response)}}
    elif route.returns != JSON:
        response["content"] = {route.returns: media_schema(route.returns)}
    return response
