"""The server itself: whether it lives, what it counts, what it can do, and its end."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from smokebox import __version__
from smokebox.errors import ServiceUnavailable
from smokebox.server.call import Call
from smokebox.server.docs import HEADERS, make_page
from smokebox.server.endpoint import JSON, endpoint
from smokebox.server.health import METRICS
from smokebox.server.openapi import make_document
from smokebox.wire.answers import Health
from smokebox.wire.requests import Shutdown

_TEXT = "text/plain"
_HTML = "text/html"


@endpoint("GET", "/health", public=True)
async def health(call: Call) -> Health:
    """Whether the server lives. It does, if this is answered."""
    return Health(ok=True, version=__version__, draining=call.state.drain.begun)


@endpoint("GET", "/ready", public=True, errors=(ServiceUnavailable,))
async def ready(call: Call) -> Health:
    """Whether the server can work: not while it is about to stop, or cannot write."""
    await call.state.health.check(call.state)
    return Health(ok=True, version=__version__)


@endpoint("GET", METRICS, admin=True, gives=_TEXT)
async def metrics(call: Call) -> Response:
    """What the server counts, as Prometheus reads it. Also at /metrics."""
    text = call.state.metrics.render(await call.host.list(), call.host.traffic)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@endpoint("POST", "/shutdown", admin=True, status=202)
async def shutdown(call: Call, body: Shutdown) -> Health:
    """Stop the server, once what it is at is done.

    Sandboxes are put to sleep, which ends their processes and keeps their files; with `keep`
    they run on for the next server.
    """
    call.state.drain.ask(keep=body.sandboxes == "keep")
    return Health(ok=True, version=__version__, draining=True)


@endpoint("GET", "/openapi.json", public=True)
async def openapi(call: Call) -> dict[str, Any]:
    """This API as an OpenAPI document, for programs."""
    return Response(_document(), media_type=JSON)  # type: ignore[return-value]


@endpoint("GET", "/docs", public=True, gives=_HTML)
async def docs(call: Call) -> HTMLResponse:
    """This API as a page, for people."""
    return HTMLResponse(_page(), headers=HEADERS)


@functools.cache
def _document() -> bytes:
    from smokebox.server.routes import all_endpoints, all_sockets  # Which gather us, too.

    return msgspec.json.encode(make_document(all_endpoints(), all_sockets()))


@functools.cache
def _page() -> str:
    return make_page(msgspec.json.decode(_document()))


ENDPOINTS = [health, ready, metrics, shutdown, openapi, docs]
