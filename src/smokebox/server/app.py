"""The ASGI app of the server: endpoints, the bridge protocol and the request guard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route, Router, WebSocketRoute

from smokebox.errors import NotFound
from smokebox.foundation import sse
from smokebox.server.compat.bridge import app as bridge
from smokebox.server.guard import RequestGuard
from smokebox.server.health import METRICS, PROBES
from smokebox.server.routes import all_endpoints, all_sockets, system
from smokebox.wire import API

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from smokebox.server.endpoint import ApiEndpoint
    from smokebox.server.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """Create the ASGI app that serves one engine."""
    endpoints = all_endpoints()
    routes: list[BaseRoute] = [_route(API + endpoint.path, endpoint) for endpoint in endpoints]
    routes += [WebSocketRoute(API + socket.path, socket) for socket in all_sockets()]
    routes += bridge.routes()
    # The path that Prometheus scrapes by default.
    routes.append(_route(METRICS, system.metrics))
    router = Router(routes=routes, redirect_slashes=False, default=_not_found)
    guard = RequestGuard(
        router,
        state,
        routes=routes,
        public=frozenset(API + endpoint.path for endpoint in endpoints if endpoint.public),
        probes=PROBES,
    )
    return bridge.BridgeMiddleware(guard, state)


def _route(path: str, endpoint: ApiEndpoint) -> Route:
    route = Route(path, endpoint, methods=[endpoint.method], include_in_schema=False)
    if route.methods is not None and endpoint.returns == sse.MEDIA:
        # Starlette adds HEAD to GET, and would wait for the end of a stream without a reader.
        route.methods.discard("HEAD")
    return route


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(
        f"there is nothing at {scope['path']}.",
        hint=f"See {API}/openapi.json for the paths.",
        kind="path",
        name=scope["path"],
    )
