"""The OpenAPI document of the native API, made from its endpoints, and its web page."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
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
from smokebox.wire.failure import FailureAnswer, status_of

if TYPE_CHECKING:
    from smokebox.server.endpoint import Endpoint
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


def make_document(endpoints: Sequence[Endpoint], sockets: Sequence[WebSocketEndpoint]) -> Schema:
    """Make the OpenAPI 3.1 document of these endpoints."""
    kinds = [kind for one in endpoints for kind in (one.body, one.response) if kind is not None]
    schemas = SchemaSet([FailureAnswer, *kinds])
    paths: dict[str, Schema] = {}
    for one in endpoints:
        paths.setdefault(API + one.path, {})[one.method.lower()] = _operation(one, schemas)
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
        "tags": tags(_module(one) for one in endpoints),
        "paths": paths,
        # OpenAPI cannot describe these: they start as a GET with an upgrade.
        "x-websockets": {API + one.path: _socket(one, schemas) for one in sockets},
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
        kinds = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._schemas = dict(zip(kinds, schemas, strict=True))
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])

    def of(self, kind: Any) -> Schema:
        """Return a reference to the schema of a type."""
        schema: Schema = self._schemas[kind]
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


def _operation(one: Endpoint, schemas: SchemaSet) -> Schema:
    operation: Schema = {
        "operationId": one.name,
        "tags": [_module(one).rpartition(".")[2]],
        "summary": one.summary,
        "parameters": [
            *path_parameters(one.path, _PARTS),
            *schemas.parameters(one.query),
            *_header_parameters(one),
        ],
        "responses": {**_responses(one, schemas), **_failures(one, schemas)},
    }
    if one.description:
        operation["description"] = one.description
    if one.body is not None:
        content = {JSON: {"schema": schemas.of(one.body)}}
        operation["requestBody"] = {"required": _has_required(one.body), "content": content}
    elif one.accepts != JSON:
        content = {one.accepts: {"schema": _BINARY}}
        operation["requestBody"] = {"required": True, "content": content}
    if one.public:
        operation["security"] = []
    return operation


def _responses(one: Endpoint, schemas: SchemaSet) -> Schema:
    responses = {str(one.status): _response(one, schemas, one.status)}
    if one.slow:
        # The status of a slow response is sent before its result is known.
        responses["200"] = _response(one, schemas, 200)
    if _takes_range(one):
        responses["206"] = _response(one, schemas, 206)
        responses["416"] = {
            "description": status_title(416),
            "content": _json(schemas.of(FailureAnswer)),
        }
    return responses


def _response(one: Endpoint, schemas: SchemaSet, status: int) -> Schema:
    response: Schema = {"description": status_title(status), "headers": _request_id()}
    if status == 204:
        return response
    if one.response is not None:
        schema = schemas.of(one.response)
        late = [schema, schemas.of(FailureAnswer)]
        response["content"] = _json({"anyOf": late} if one.slow and status == 200 else schema)
    elif one.returns == JSON:
        # Only blanks on success.
        response["content"] = _json(schemas.of(FailureAnswer))
    else:
        response["content"] = {media: media_schema(media) for media in one.returns.split(", ")}
    return response


def media_schema(media: str) -> Schema:
    """Describe content that is not JSON."""
    # OpenAPI 3.1 cannot describe the events of a stream: the description does.
    if media == sse.MEDIA:
        return {}
    return {"schema": {"type": "string"} if media.startswith("text/") else _BINARY}


def _failures(one: Endpoint, schemas: SchemaSet) -> Schema:
    codes: dict[int, set[str]] = {500: {"internal"}}
    for kind in (*_common(one), *one.errors):
        for each in _family(kind):
            if (status := status_of(each)) == status_of(kind):
                codes.setdefault(status, set()).add(each.code)
    return {
        str(status): {
            "description": f"{status_title(status)} Codes: {', '.join(sorted(codes[status]))}.",
            "headers": _retry_after(status),
            "content": _json(schemas.of(FailureAnswer)),
        }
        for status in sorted(codes)
    }


def _common(one: Endpoint) -> Iterable[type[SmokeboxError]]:
    """Yield the errors that most requests can have."""
    if one.public:
        return
    yield from (Unauthorized, Forbidden, LimitReached, ServiceUnavailable)
    if one.query is not None or one.body is not None or "{id}" in one.path:
        yield InvalidOption
    if one.body is not None:
        yield RequestTooLarge
    if one.needs_sandbox:
        yield NotFound


def _family(kind: type[SmokeboxError]) -> Iterable[type[SmokeboxError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def path_parameters(path: str, parts: Mapping[str, Schema]) -> list[Schema]:
    """Return the parameters in a path, with the schemas that `parts` has for them."""
    return [
        {"name": name, "in": "path", "required": True, "schema": parts.get(name, _NAME)}
        for name in _PART.findall(path)
    ]


def _header_parameters(one: Endpoint) -> list[Schema]:
    names = []
    if IDEMPOTENCY_KEY in one.description.lower():
        names.append("Idempotency-Key")
    if one.returns == sse.MEDIA and "cursor" in getattr(one.query, "__struct_fields__", ()):
        names.append("Last-Event-ID")
    if _takes_range(one):
        names.append("Range")
    return [{"name": name, "in": "header", "schema": {"type": "string"}} for name in names]


def _takes_range(one: Endpoint) -> bool:
    return one.method == "GET" and one.returns == BYTES


def _without_null(field: Schema) -> Schema:
    """Return the schema of a query field, which cannot be null in a URL."""
    choices = [one for one in field.get("anyOf", ()) if one != {"type": "null"}]
    if not choices:
        return field
    rest = {name: value for name, value in field.items() if name not in ("anyOf", "default")}
    return {**rest, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}


def _socket(one: WebSocketEndpoint, schemas: SchemaSet) -> Schema:
    return {
        "summary": one.summary,
        "description": one.description,
        "parameters": [*path_parameters(one.path, _PARTS), *schemas.parameters(one.query)],
    }


def status_title(status: int) -> str:
    """Describe an HTTP status."""
    return _TITLES.get(status) or f"{HTTPStatus(status).phrase}."


def _has_required(body: type) -> bool:
    return any(field.required for field in msgspec.structs.fields(body))


def _json(schema: Schema) -> Schema:
    return {JSON: {"schema": schema}}


def _request_id() -> Schema:
    return {REQUEST_ID: {"schema": {"type": "string"}}}


def _retry_after(status: int) -> Schema:
    return {"retry-after": {"schema": {"type": "integer"}}} if status in (429, 503) else {}


def _module(one: Endpoint) -> str:
    return one.handler.__module__


def tags(modules: Iterable[str]) -> list[Schema]:
    """Return one tag for each module, described by its docstring."""
    return [_tag(module) for module in dict.fromkeys(modules)]


def _tag(module: str) -> Schema:
    text = inspect.getdoc(sys.modules[module]) or ""
    return {"name": module.rpartition(".")[2], "description": text.partition("\n\n")[0]}


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
    """Make the web page of an OpenAPI document."""
    info = document["info"]
    sections = [_section(document, tag) for tag in document["tags"]]
    if sockets := document.get("x-websockets"):
        sections.append("<h2>WebSockets</h2>")
        sections += [_entry("WS", path, one) for path, one in sockets.items()]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        description=escape(info["description"]),
        sections="\n".join(sections),
    )


def _section(document: dict[str, Any], tag: dict[str, str]) -> str:
    entries = [
        _entry(method.upper(), path, one)
        for path, methods in document["paths"].items()
        for method, one in methods.items()
        if tag["name"] in one["tags"]
    ]
    return "\n".join([f"<h2>{escape(tag['description'])}</h2>", *entries])


def _entry(method: str, path: str, one: dict[str, Any]) -> str:
    names = [f"<code>{escape(field['name'])}</code>" for field in one["parameters"]]
    lines = [
        f"<details><summary><code><b>{method}</b>{escape(path)}</code> "
        f"{escape(one['summary'])}</summary>",
        f"<p>{escape(one.get('description', ''))}</p>",
        f"<p>Parameters: {', '.join(names)}.</p>" if names else "",
    ]
    bodies = one.get("requestBody", {}).get("content", {})
    lines += [f"<p>Body: {_shape(*body)}</p>" for body in bodies.items()]
    lines += [
        f"<p><code>{status}</code> {escape(response['description'])}</p>"
        for status, response in one.get("responses", {}).items()
    ]
    return "".join([*lines, "</details>"])


def _shape(media: str, content: dict[str, Any]) -> str:
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return f"<code>{escape(media)}</code> {escape(name)}"
