"""The server itself: whether it lives, what it counts, what it can do, and its end."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from smokebox import __version__
from smokebox.errors import ServiceUnavailable
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.health import METRICS
from smokebox.wire.answers import Health
from smokebox.wire.requests import Shutdown

_TEXT = "text/plain"


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
    text = call.state.metrics.render(await call.host.list())
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@endpoint("POST", "/shutdown", admin=True, status=202)
async def shutdown(call: Call, body: Shutdown) -> Health:
    """Stop the server, once what it is at is done.

    Sandboxes are put to sleep, which ends their processes and keeps their files; with `keep`
    they run on for the next server.
    """
    call.state.drain.ask(keep=body.sandboxes == "keep")
    return Health(ok=True, version=__version__, draining=True)


ENDPOINTS = [health, ready, metrics, shutdown]
