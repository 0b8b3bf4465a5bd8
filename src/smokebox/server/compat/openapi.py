"""The description of the bridge protocol that it serves of itself."""

from __future__ import annotations

import functools
import html
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from starlette.responses import Response

from smokebox import __version__
from smokebox.server.call import Call
from smokebox.server.compat.messages import answer

if TYPE_CHECKING:
    from starlette.types import Scope

_BYTES = "application/octet-stream"
_ONE = "/v1/sandbox/{id}"
_OK = {"type": "object", "properties": {"ok": {"const": True}}}
_ID_ANSWER = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    "required": ["error", "code"],
}
_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[a-z2-7]{1,128}$"},
}
_SESSION = {
    "name": "Session-Id",
    "in": "header",
    "schema": {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,128}$"},
}
_EXEC = {
    "type": "object",
    "properties": {
        "argv": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "timeout_ms": {"type": "number", "exclusiveMinimum": 0},
        "cwd": {"type": "string"},
    },
    "required": ["argv"],
}
_MOUNT = {
    "type": "object",
    "required": ["mountPath"],
    "properties": {
        "bucket": {"type": "string"},
        "binding": {"type": "string"},
        "mountPath": {"type": "string"},
        "options": {
            "type": "object",
            "properties": {
                "endpoint": {"type": "string"},
                "region": {"type": "string"},
                "readOnly": {"type": "boolean"},
                "prefix": {"type": "string"},
                "credentials": {
                    "type": "object",
                    "required": ["accessKeyId", "secretAccessKey"],
                    "properties": {
                        "accessKeyId": {"type": "string"},
                        "secretAccessKey": {"type": "string"},
                        "sessionToken": {"type": "string"},
                    },
                },
            },
        },
    },
}
_UNMOUNT = {
    "type": "object",
    "required": ["mountPath"],
    "properties": {"mountPath": {"type": "string"}},
}
_CREATE = {
    "type": "object",
    "properties": {
        "exposedPorts": {"type": "array", "items": {"type": "integer"}},
        "timeoutMs": {"type": "number"},
        "createTimeoutMs": {"type": "number"},
        "mounts": {"type": "array", "items": _MOUNT},
    },
}
_SESSION_BODY = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "cwd": {"type": "string"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_TUNNEL_BODY = {"type": "object", "properties": {"name": {"type": "string"}}}
_TUNNEL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "port": {"type": "integer"},
        "url": {"type": "string"},
        "hostname": {"type": "string"},
        "name": {"type": "string"},
        "createdAt": {"type": "string"},
    },
    "required": ["id", "port", "url", "hostname", "createdAt"],
}
_DELETED = {
    "type": "object",
    "properties": {
        "success": {"type": "boolean"},
        "sessionId": {"type": "string"},
        "timestamp": {"type": "string"},
    },
}
_STATS = {
    "type": "object",
    "properties": {
        "warm": {"type": "integer"},
        "assigned": {"type": "integer"},
        "total": {"type": "integer"},
        "config": {
            "type": "object",
            "properties": {
                "warmTarget": {"type": "integer"},
                "refreshInterval": {"type": "integer"},
            },
        },
        "maxInstances": {"type": ["integer", "null"]},
    },
}


async def document(call: Call) -> Response:
    """The description, for programs."""
    return answer(_document())


async def page(call: Call) -> Response:
    """The description, for people."""
    return Response(_page(), media_type="text/html")


def take_token(scope: Scope) -> None:
    """Move a key from `?token=`, where a browser can put it, to its header."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    told = [value for name, value in pairs if name == "token"]
    names = {name for name, _ in scope["headers"]}
    if told and b"authorization" not in names:
        key = told[-1].encode("utf-8", "replace")
        scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key)]
    scope["query_string"] = urlencode([one for one in pairs if one[0] != "token"]).encode()


@functools.cache
def _document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Smokebox, as a Cloudflare Sandbox bridge",
            "version": __version__,
            "description": "What OpenAI's Agents SDK asks of a sandbox.",
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
        "security": [{"key": []}],
        "paths": _paths(),
    }


def _paths() -> dict[str, Any]:
    port = _parameter("port", "path", "integer")
    path = _parameter("path", "path", "string")
    return {
        "/health": {
            "get": _operation("healthCheck", "Whether the server can work", {200: _OK}, (503,))
            | {"security": []}
        },
        "/v1/sandbox": {
            "post": _operation(
                "createSandbox", "Make a sandbox", {200: _ID_ANSWER}, (400, 503), body=_CREATE
            )
        },
        _ONE: {"delete": _operation("deleteSandbox", "Destroy a sandbox", {204: None}, (), _ID)},
        f"{_ONE}/exec": {
            "post": _operation(
                "execCommand",
                "Run a command; events stdout, stderr (base64), and last exit or error",
                {200: "text/event-stream"},
                (400, 403, 503),
                _ID,
                _SESSION,
                body=_EXEC,
            )
        },
        f"{_ONE}/file/{{path}}": {
            "get": _operation(
                "readFile", "Read a file", {200: _BYTES}, (400, 403, 404, 502), _ID, path, _SESSION
            ),
            "put": _operation(
                "writeFile",
                "Write a file of at most 32 MiB",
                {200: _OK},
                (400, 403, 413, 502),
                _ID,
                path,
                _SESSION,
                body=_BYTES,
            ),
        },
        f"{_ONE}/running": {
            "get": _operation(
                "isSandboxRunning",
                "Whether what was done in a sandbox is kept",
                {200: {"type": "object", "properties": {"running": {"type": "boolean"}}}},
                (),
                _ID,
            )
        },
        f"{_ONE}/persist": {
            "post": _operation(
                "persistWorkspace",
                "The workspace as a tar archive",
                {200: _BYTES},
                (400, 502),
                _ID,
                _parameter("excludes", "query", "string"),
            )
        },
        f"{_ONE}/hydrate": {
            "post": _operation(
                "hydrateWorkspace",
                "Unpack a tar archive of at most 32 MiB into the workspace",
                {200: _OK},
                (400, 502),
                _ID,
                body=_BYTES,
            )
        },
        f"{_ONE}/pty": {
            "get": _operation(
                "ptyTerminal",
                "A terminal over WebSocket",
                {101: None},
                (400, 502),
                _ID,
                _parameter("cols", "query", "integer"),
                _parameter("rows", "query", "integer"),
                _parameter("shell", "query", "string"),
                _parameter("session", "query", "string"),
            )
        },
        f"{_ONE}/session": {
            "post": _operation(
                "createSession",
                "Make a session",
                {200: _ID_ANSWER},
                (400, 403, 409),
                _ID,
                body=_SESSION_BODY,
            )
        },
        f"{_ONE}/session/{{sid}}": {
            "delete": _operation(
                "deleteSession",
                "End a session",
                {200: _DELETED},
                (400, 404),
                _ID,
                _parameter("sid", "path", "string"),
            )
        },
        f"{_ONE}/mount": {
            "post": _operation(
                "mountBucket",
                "Have a bucket be a directory",
                {200: _OK},
                (400, 502, 503),
                _ID,
                body=_MOUNT,
            )
        },
        f"{_ONE}/unmount": {
            "post": _operation(
                "unmountBucket",
                "Have it be one no more",
                {200: _OK},
                (400, 502, 503),
                _ID,
                body=_UNMOUNT,
            )
        },
        f"{_ONE}/tunnel/{{port}}": {
            "post": _operation(
                "createTunnel",
                "Have a port be seen at a URL",
                {200: _TUNNEL},
                (400, 409),
                _ID,
                port,
                body=_TUNNEL_BODY,
            ),
            "delete": _operation(
                "deleteTunnel", "Have it not be seen any more", {204: None}, (400,), _ID, port
            ),
        },
        "/v1/pool/stats": {
            "get": _operation("getPoolStats", "What is made ahead", {200: _STATS}, (403,))
        },
        "/v1/pool/prime": {
            "post": _operation("primePool", "Make ahead what is missing", {200: _OK}, (403,))
        },
        "/v1/pool/shutdown-prewarmed": {
            "post": _operation("shutdownPrewarmed", "Remove what is made ahead", {200: _OK}, (403,))
        },
        "/v1/openapi.json": {
            "get": _operation("getOpenApiSchema", "This", {200: {"type": "object"}}, ())
        },
    }


def _operation(
    name: str,
    summary: str,
    answers: dict[int, Any],
    errors: tuple[int, ...],
    *parameters: dict[str, Any],
    body: Any = None,
) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    found: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            **{str(code): _answer("Done", kind) for code, kind in answers.items()},
            **{str(code): _answer("Refused", error) for code in errors},
        },
    }
    if body is not None:
        found["requestBody"] = {"content": _content(body)}
    return found


def _answer(description: str, kind: Any) -> dict[str, Any]:
    if kind is None:
        return {"description": description}
    return {"description": description, "content": _content(kind)}


def _content(kind: Any) -> dict[str, Any]:
    """What goes over the wire: a media type of plain bytes, or a schema of JSON."""
    return {kind: {}} if isinstance(kind, str) else {"application/json": {"schema": kind}}


def _parameter(name: str, where: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": kind}}


@functools.cache
def _page() -> str:
    found = _document()
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(one['summary'])}</td><td>{', '.join(one['responses'])}</td></tr>"
        for path, methods in found["paths"].items()
        for method, one in methods.items()
    )
    title = html.escape(found["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:1rem/1.5 sans-serif;margin:2rem}td{padding:.2rem 1rem .2rem 0}</style>"
        f"<h1>{title}</h1><table>{rows}</table>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p></html>'
    )
