"""The server itself: health, metrics, documentation and shutdown."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from smokebox import __version__
from smokebox.errors import ServiceUnavailable
from smokebox.server.endpoint import JSON, ApiCall, endpoint
from smokebox.server.health import METRICS
from smokebox.server.openapi import HEADERS, make_document, make_page
from smokebox.wire.requests import Shutdown
from smokebox.wire.responses import Health

_TEXT = "text/plain"
_HTML = "text/html"


@endpoint("GET", "/health", public=True)
async def health(call: ApiCall) -> Health:
    """Check that the server is running. Needs no key."""
    return Health(ok=True, version=__version__, draining=call.state.drain.begun)


@endpoint("GET", "/ready", public=True, errors=(ServiceUnavailable,))
async def ready(call: ApiCall) -> Health:
    """Check that the server can handle requests. Needs no key.

    It cannot while it is about to stop, or if its state directory is not writable.
    """
    await call.state.health.check(call.state)
    return Health(ok=True, version=__version__)


@endpoint("GET", METRICS, admin=True, returns=_TEXT)
async def metrics(call: ApiCall) -> Response:
    """Return the metrics of the server in the format of Prometheus. Also at /metrics."""
    text = call.state.metrics.render(await call.host.list(), call.host.traffic)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@endpoint("POST", "/shutdown", admin=True, status=202)
async def shutdown(call: ApiCall, body: Shutdown) -> Health:
    """Stop the server after its running requests.

    Sandboxes are put to sleep, which ends their processes and keeps their files. With
    `"sandboxes": "keep"` they keep running for the next server.
    """
    call.state.drain.begin(keep=body.sandboxes == "keep")
    return Health(ok=True, version=__version__, draining=True)


@endpoint("GET", "/openapi.json", public=True)
async def openapi(call: ApiCall) -> dict[str, Any]:
    """Return this OpenAPI document."""
    return Response(_document(), media_type=JSON)  # type: ignore[return-value]


@endpoint("GET", "/docs", public=True, returns=_HTML)
async def docs(call: ApiCall) -> HTMLResponse:
    """Return the OpenAPI document as a web page."""
    return HTMLResponse(_page(), headers=HEADERS)


@functools.cache
def _document() -> bytes:
    from smokebox.server.routes import all_endpoints, all_sockets  # They import this module.

    return msgspec.json.encode(make_document(all_endpoints(), all_sockets()))


@functools.cache
def _page() -> str:
    return make_page(msgspec.json.decode(_document()))


ENDPOINTS = [health, ready, metrics, shutdown, openapi, docs]
