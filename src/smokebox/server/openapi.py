"""The OpenAPI document of the native API, generated from its endpoints, and its web page."""

from __future__ import annotations

import inspect
import re
import sys
from html import escape
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox import __version__
from smokebox.errors import (
    Forbidden,
    InvalidOption,
    LimitReached,
    NotFound,
    RequestTooLarge,
    ServiceUnavailable,
    SmokeboxError,
    Unauthorized,
)
from smokebox.foundation import sse
from smokebox.server.endpoint import BYTES, JSON
from smokebox.wire import API, IDEMPOTENCY_KEY, REQUEST_ID
from smokebox.wire.failure import FailureResponse, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from smokebox.server.endpoint import ApiEndpoint
    from smokebox.server.websocket import WebSocketEndpoint

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PART = re.compile(r"\{(\w+)\}")
_NAME: Schema = {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.:@+-]*$"}
_PARTS: dict[str, Schema] = {
    "id": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
    "key": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
}
_BINARY: Schema = {"type": "string", "format": "binary"}
_TITLES = {
    101: "The connection switches to WebSocket.",
    200: "Success.",
    201: "Created.",
    202: "Accepted; the work has started.",
    204: "Success, with no content.",
    206: "The requested part of the file.",
    400: "The request is invalid.",
    401: "The API key is missing or invalid.",
    403: "The key or the sandbox does not allow it.",
    404: "Not found.",
    409: "It conflicts with the current state.",
    410: "The sandbox stopped during the request.",
    413: "The request is too large.",
    416: "The file has no such range.",
    422: "The operation failed.",
    429: "Too many requests, or a limit was reached.",
    500: "An internal error.",
    501: "Not supported by this sandbox or host.",
    502: "The operation failed in the sandbox.",
    503: "The server cannot do it now. Retry later.",
    504: "The operation timed out.",
    507: "The disk is full.",
}
_DESCRIPTION = """\
Linux sandboxes by id. An error is JSON with a `code` for programs, a `message` and a `hint`
for people, and `retryable`. A response that takes longer than five seconds starts with status
200 and blanks; an error is then only in its body. The header `X-Request-ID` of a request
names it in the log."""


def make_document(endpoints: Sequence[ApiEndpoint], sockets: Sequence[WebSocketEndpoint]) -> Schema:
    """Generate the OpenAPI 3.1 document of these endpoints."""
    types = [
        type
        for endpoint in endpoints
        for type in (endpoint.body, endpoint.response)
        if type not in (None, bytes)
    ]
    schemas = SchemaSet([FailureResponse, *types])
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        operations = paths.setdefault(API + endpoint.path, {})
        operations[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Smokebox",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "tags": tags(endpoint.handler for endpoint in endpoints),
        "paths": paths,
        # OpenAPI cannot describe these: they start as a GET with an upgrade.
        "x-websockets": {API + socket.path: _socket(socket, schemas) for socket in sockets},
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. The unix socket of a server needs none.",
                }
            },
        },
    }


class SchemaSet:
    """The schemas of the types of requests and responses."""

    def __init__(self, types: Iterable[Any]) -> None:
        unique = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(unique, ref_template=_REF)
        self._schemas = dict(zip(unique, schemas, strict=True))
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])

    def of(self, type: Any) -> Schema:
        """Return a reference to the schema of a type."""
        schema: Schema = self._schemas[type]
        return schema

    def parameters(self, query: type | None) -> list[Schema]:
        """Return the parameters of a query, one for each field of its type."""
        if query is None:
            return []
        ((_,), components) = msgspec.json.schema_components([query], ref_template=_REF)
        schema = components[query.__name__]
        return [
            {
                "name": name,
                "in": "query",
                "required": name in schema.get("required", ()),
                "schema": _without_null(field),
            }
            for name, field in schema["properties"].items()
        ]


def summary_of(handler: Callable[..., Any]) -> str:
    """Return the first paragraph of a handler's docstring."""
    return " ".join((inspect.getdoc(handler) or "").partition("\n\n")[0].split())


def description_of(handler: Callable[..., Any]) -> str:
    """Return a handler's docstring after its first paragraph."""
    return " ".join((inspect.getdoc(handler) or "").partition("\n\n")[2].split())


def _operation(endpoint: ApiEndpoint, schemas: SchemaSet) -> Schema:
    operation: Schema = {
        "operationId": endpoint.name,
        "tags": [tag_of(endpoint.handler)],
        "summary": summary_of(endpoint.handler),
        "parameters": [
            *path_parameters(endpoint.path, _PARTS),
            *schemas.parameters(endpoint.query),
            *_header_parameters(endpoint),
        ],
        "responses": {**_responses(endpoint, schemas), **_failures(endpoint, schemas)},
    }
    if description := description_of(endpoint.handler):
        operation["description"] = description
    if endpoint.accepts != JSON:
        content = {endpoint.accepts: {"schema": _BINARY}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None:
        required = any(field.required for field in msgspec.structs.fields(endpoint.body))
        content = _json(schemas.of(endpoint.body))
        operation["requestBody"] = {"required": required, "content": content}
    if endpoint.public:
        operation["security"] = []
    return operation


def _responses(endpoint: ApiEndpoint, schemas: SchemaSet) -> Schema:
    responses = {str(endpoint.status): _response(endpoint, schemas, endpoint.status)}
    if endpoint.slow:
        # The status of a slow response is sent before its result is known.
        responses["200"] = _response(endpoint, schemas, 200)
    if _takes_range(endpoint):
        responses["206"] = _response(endpoint, schemas, 206)
        responses["416"] = {
            "description": status_title(416),
            "content": _json(schemas.of(FailureResponse)),
        }
    return responses


def _response(endpoint: ApiEndpoint, schemas: SchemaSet, status: int) -> Schema:
    response: Schema = {
        "description": status_title(status),
        "headers": {REQUEST_ID: {"schema": {"type": "string"}}},
    }
    if status == 204:
        return response
    if endpoint.response is not None:
        schema = schemas.of(endpoint.response)
        if endpoint.slow and status == 200:
            schema = {"anyOf": [schema, schemas.of(FailureResponse)]}
        response["content"] = _json(schema)
    elif endpoint.returns == JSON:
        # Only whitespace on success.
        response["content"] = _json(schemas.of(FailureResponse))
    else:
        response["content"] = {media: media_schema(media) for media in endpoint.returns.split(", ")}
    return response


def media_schema(media: str) -> Schema:
    """Describe content that is not JSON."""
    # OpenAPI 3.1 cannot describe the events of a stream: the description does.
    if media == sse.MEDIA:
        return {}
    return {"schema": {"type": "string"} if media.startswith("text/") else _BINARY}


def _failures(endpoint: ApiEndpoint, schemas: SchemaSet) -> Schema:
    codes: dict[int, set[str]] = {500: {"internal"}}
    for error in (*_common_errors(endpoint), *endpoint.errors):
        for subclass in _with_subclasses(error):
            if (status := status_of(subclass)) == status_of(error):
                codes.setdefault(status, set()).add(subclass.code)
    retry_after = {"retry-after": {"schema": {"type": "integer"}}}
    return {
        str(status): {
            "description": f"{status_title(status)} Codes: {', '.join(sorted(codes[status]))}.",
            "headers": retry_after if status in (429, 503) else {},
            "content": _json(schemas.of(FailureResponse)),
        }
        for status in sorted(codes)
    }


def _common_errors(endpoint: ApiEndpoint) -> Iterable[type[SmokeboxError]]:
    """Yield the errors that an endpoint does not declare, as most endpoints have them."""
    if endpoint.public:
        return
    yield from (Unauthorized, Forbidden, LimitReached, ServiceUnavailable)
    if endpoint.query is not None or endpoint.body is not None or "{id}" in endpoint.path:
        yield InvalidOption
    if endpoint.body is not None:
        yield RequestTooLarge
    if endpoint.needs_sandbox:
        yield NotFound


def _with_subclasses(error: type[SmokeboxError]) -> Iterable[type[SmokeboxError]]:
    yield error
    for child in error.__subclasses__():
        yield from _with_subclasses(child)


def path_parameters(path: str, parts: Mapping[str, Schema]) -> list[Schema]:
    """Return the parameters in a path, with the schemas that `parts` has for them."""
    return [
        {"name": name, "in": "path", "required": True, "schema": parts.get(name, _NAME)}
        for name in _PART.findall(path)
    ]


def _header_parameters(endpoint: ApiEndpoint) -> list[Schema]:
    names = []
    if IDEMPOTENCY_KEY in description_of(endpoint.handler).lower():
        names.append("Idempotency-Key")
    fields = getattr(endpoint.query, "__struct_fields__", ())
    if endpoint.returns == sse.MEDIA and "cursor" in fields:
        names.append("Last-Event-ID")
    if _takes_range(endpoint):
        names.append("Range")
    return [{"name": name, "in": "header", "schema": {"type": "string"}} for name in names]


def _takes_range(endpoint: ApiEndpoint) -> bool:
    return endpoint.method == "GET" and endpoint.returns == BYTES


def _without_null(field: Schema) -> Schema:
    """Return the schema of a query field, which cannot be null in a URL."""
    choices = [choice for choice in field.get("anyOf", ()) if choice != {"type": "null"}]
    if not choices:
        return field
    rest = {name: value for name, value in field.items() if name not in ("anyOf", "default")}
    return {**rest, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}


def _socket(socket: WebSocketEndpoint, schemas: SchemaSet) -> Schema:
    return {
        "summary": summary_of(socket.handler),
        "description": description_of(socket.handler),
        "parameters": [
            *path_parameters(socket.path, _PARTS),
            *schemas.parameters(socket.query),
        ],
    }


def status_title(status: int) -> str:
    """Describe an HTTP status."""
    return _TITLES.get(status) or f"{HTTPStatus(status).phrase}."


def _json(schema: Schema) -> Schema:
    return {JSON: {"schema": schema}}


def tag_of(handler: Callable[..., Any]) -> str:
    """Return the tag of a handler: the name of its module."""
    return handler.__module__.rpartition(".")[2]


def tags(handlers: Iterable[Callable[..., Any]]) -> list[Schema]:
    """Return one tag for each module of these handlers, described by the module's docstring."""
    modules = {tag_of(handler): sys.modules[handler.__module__] for handler in handlers}
    return [
        {"name": name, "description": (inspect.getdoc(module) or "").partition("\n\n")[0]}
        for name, module in modules.items()
    ]


HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title} API</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
code {{ font-family: ui-monospace, monospace; }}
summary code b {{ display: inline-block; min-width: 4.5rem; }}
details {{ border-bottom: 1px solid #8884; padding: .4rem 0; }}
dd, p {{ margin: .3rem 0 .3rem 1rem; }}
</style>
</head>
<body>
<h1>{title} {version}</h1>
<p>{description}</p>
<p>For programs: <a href="openapi.json">openapi.json</a>.</p>
{sections}
</body>
</html>
"""


def make_page(document: dict[str, Any]) -> str:
    """Generate the web page of an OpenAPI document."""
    info = document["info"]
    sections = [_section(document, tag) for tag in document["tags"]]
    if sockets := document.get("x-websockets"):
        sections.append("<h2>WebSockets</h2>")
        sections += [_entry("WS", path, socket) for path, socket in sockets.items()]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        description=escape(info["description"]),
        sections="\n".join(sections),
    )


def _section(document: dict[str, Any], tag: dict[str, str]) -> str:
    entries = [
        _entry(method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if tag["name"] in operation["tags"]
    ]
    return "\n".join([f"<h2>{escape(tag['description'])}</h2>", *entries])


def _entry(method: str, path: str, operation: dict[str, Any]) -> str:
    names = [f"<code>{escape(field['name'])}</code>" for field in operation["parameters"]]
    lines = [
        f"<details><summary><code><b>{method}</b>{escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>",
        f"<p>{escape(operation.get('description', ''))}</p>",
        f"<p>Parameters: {', '.join(names)}.</p>" if names else "",
    ]
    bodies = operation.get("requestBody", {}).get("content", {})
    lines += [f"<p>Body: {_shape(*body)}</p>" for body in bodies.items()]
    lines += [
        f"<p><code>{status}</code> {escape(response['description'])}</p>"
        for status, response in operation.get("responses", {}).items()
    ]
    return "".join([*lines, "</details>"])


def _shape(media: str, content: dict[str, Any]) -> str:
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f"<code>{escape(media)}</code> {escape(name)}"
