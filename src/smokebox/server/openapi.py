"""The OpenAPI document of the API, made from its endpoints."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
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
from smokebox.server.endpoint import BYTES, JSON
from smokebox.wire import API, IDEMPOTENCY_KEY, REQUEST_ID, sse
from smokebox.wire.failure import FailureAnswer, status_of

if TYPE_CHECKING:
    from smokebox.server.endpoint import Endpoint
    from smokebox.server.sockets import Socket

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
    200: "What was asked for.",
    201: "What was made.",
    202: "It was begun.",
    204: "It was done.",
    206: "A part of it.",
    400: "The request makes no sense.",
    401: "No key, or one that opens nothing.",
    403: "The key, or the sandbox, does not allow it.",
    404: "There is no such thing.",
    409: "Something is in the way.",
    410: "The sandbox stopped under the request.",
    413: "It is too large.",
    416: "The file has no such part.",
    422: "It was tried, and what was asked of did not go along.",
    429: "Too much at a time.",
    500: "A defect, or something that is broken.",
    501: "This sandbox, or this host, cannot do it.",
    503: "The server cannot do it at the moment.",
    504: "It took too long.",
    507: "The disk is full.",
}
_DESCRIPTION = """\
Linux sandboxes by id. An error is JSON with a `code` for programs, a `message` and a `hint`
for people, and `retryable`. An answer that takes longer than five seconds begins with status
200 and blanks; an error is then told by its body alone. What a client sends as
`X-Request-ID` names the request in the log."""


def make_document(endpoints: Sequence[Endpoint], sockets: Sequence[Socket]) -> Schema:
    """The OpenAPI 3.1 document of these endpoints."""
    schemas = _Schemas(endpoints, sockets)
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
        "tags": [_tag(module) for module in dict.fromkeys(_module(one) for one in endpoints)],
        "paths": paths,
        # OpenAPI has no word for these: they begin as a GET that asks for an upgrade.
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


class _Schemas:
    """The schema of each kind that requests and answers have."""

    def __init__(self, endpoints: Iterable[Endpoint], sockets: Iterable[Socket]) -> None:
        kinds: list[Any] = [FailureAnswer]
        for one in endpoints:
            kinds += [kind for kind in (one.body, one.answer) if kind is not None]
        kinds = list(dict.fromkeys(kinds))
        found, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._found = dict(zip(kinds, found, strict=True))
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])

    def of(self, kind: Any) -> Schema:
        """What refers to the schema of a kind."""
        found: Schema = self._found[kind]
        return found

    def parameters(self, query: type | None) -> list[Schema]:
        """The fields of a query."""
        if query is None:
            return []
        ((_,), components) = msgspec.json.schema_components([query], ref_template=_REF)
        schema = components[query.__name__]
        return [
            {
                "name": name,
                "in": "query",
                "required": name in schema["required"],
                "schema": _given(field),
            }
            for name, field in schema["properties"].items()
        ]


def _operation(one: Endpoint, schemas: _Schemas) -> Schema:
    operation: Schema = {
        "operationId": one.name,
        "tags": [_module(one).rpartition(".")[2]],
        "summary": one.summary,
        "parameters": [
            *_path_parameters(one.path),
            *schemas.parameters(one.query),
            *_header_parameters(one),
        ],
        "responses": {**_answers(one, schemas), **_failures(one, schemas)},
    }
    if one.description:
        operation["description"] = one.description
    if one.body is not None:
        content = {JSON: {"schema": schemas.of(one.body)}}
        operation["requestBody"] = {"required": _has_required(one.body), "content": content}
    elif one.takes != JSON:
        content = {one.takes: {"schema": _BINARY}}
        operation["requestBody"] = {"required": True, "content": content}
    if one.public:
        operation["security"] = []
    return operation


def _answers(one: Endpoint, schemas: _Schemas) -> Schema:
    answers = {str(one.status): _answer(one, schemas, one.status)}
    if one.slow:
        # One that took long, whose status was sent before anybody knew.
        answers["200"] = _answer(one, schemas, 200)
    if _takes_range(one):
        answers["206"] = _answer(one, schemas, 206)
        answers["416"] = {"description": _TITLES[416], "content": _json(schemas.of(FailureAnswer))}
    return answers


def _answer(one: Endpoint, schemas: _Schemas, status: int) -> Schema:
    answer: Schema = {"description": _title(status), "headers": _request_id()}
    if status == 204:
        return answer
    if one.answer is not None:
        schema = schemas.of(one.answer)
        late = [schema, schemas.of(FailureAnswer)]
        answer["content"] = _json({"anyOf": late} if one.slow and status == 200 else schema)
    elif one.gives == JSON:
        # Blanks alone, if nothing went wrong.
        answer["content"] = _json(schemas.of(FailureAnswer))
    else:
        answer["content"] = {media: _plain(media) for media in one.gives.split(", ")}
    return answer


def _plain(media: str) -> Schema:
    # OpenAPI 3.1 has no word for the events of a stream: the description has them.
    if media == sse.MEDIA:
        return {}
    return {"schema": {"type": "string"} if media.startswith("text/") else _BINARY}


def _failures(one: Endpoint, schemas: _Schemas) -> Schema:
    codes: dict[int, set[str]] = {500: {"internal"}}
    for kind in (*_common(one), *one.errors):
        for each in _family(kind):
            if (status := status_of(each)) == status_of(kind):
                codes.setdefault(status, set()).add(each.code)
    return {
        str(status): {
            "description": f"{_title(status)} Codes: {', '.join(sorted(codes[status]))}.",
            "headers": _retry_after(status),
            "content": _json(schemas.of(FailureAnswer)),
        }
        for status in sorted(codes)
    }


def _common(one: Endpoint) -> Iterable[type[SmokeboxError]]:
    """What can be wrong with a request whatever it is for."""
    if one.public:
        return
    yield from (Unauthorized, Forbidden, LimitReached, ServiceUnavailable)
    if one.query is not None or one.body is not None or "{id}" in one.path:
        yield InvalidOption
    if one.body is not None:
        yield RequestTooLarge
    if one.finds:
        yield NotFound


def _family(kind: type[SmokeboxError]) -> Iterable[type[SmokeboxError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _path_parameters(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _PARTS.get(name, _NAME)}
        for name in _PART.findall(path)
    ]


def _header_parameters(one: Endpoint) -> list[Schema]:
    names = []
    if IDEMPOTENCY_KEY in one.description.lower():
        names.append("Idempotency-Key")
    if one.gives == sse.MEDIA and "cursor" in getattr(one.query, "__struct_fields__", ()):
        names.append("Last-Event-ID")
    if _takes_range(one):
        names.append("Range")
    return [{"name": name, "in": "header", "schema": {"type": "string"}} for name in names]


def _takes_range(one: Endpoint) -> bool:
    return one.method == "GET" and one.gives == BYTES


def _given(field: Schema) -> Schema:
    """The schema of what a URL says: it cannot say null, and what is left out is."""
    choices = [one for one in field.get("anyOf", ()) if one != {"type": "null"}]
    if not choices:
        return field
    rest = {name: value for name, value in field.items() if name not in ("anyOf", "default")}
    return {**rest, **(choices[0] if len(choices) == 1 else {"anyOf": choices})}


def _socket(one: Socket, schemas: _Schemas) -> Schema:
    return {
        "summary": one.summary,
        "description": one.description,
        "parameters": [*_path_parameters(one.path), *schemas.parameters(one.query)],
    }


def _title(status: int) -> str:
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


def _tag(module: str) -> Schema:
    text = inspect.getdoc(sys.modules[module]) or ""
    return {"name": module.rpartition(".")[2], "description": text.partition("\n\n")[0]}
