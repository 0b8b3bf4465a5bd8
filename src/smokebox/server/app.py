"""Wires the app together: endpoints, what other clients speak, and the door before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route, Router, WebSocketRoute

from smokebox.errors import NotFound
from smokebox.server.compat import bridge
from smokebox.server.door import Door
from smokebox.server.health import METRICS, PROBES
from smokebox.server.routes import all_endpoints, all_sockets, system
from smokebox.wire import API, sse

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from smokebox.server.endpoint import Endpoint
    from smokebox.server.state import State


def create_app(state: State) -> ASGIApp:
    """The server of one engine, as an ASGI app."""
    endpoints = all_endpoints()
    routes: list[BaseRoute] = [_route(API + one.path, one) for one in endpoints]
    routes += [WebSocketRoute(API + one.path, one) for one in all_sockets()]
    routes += bridge.routes()
    # Where everybody looks for it first.
    routes.append(_route(METRICS, system.metrics))
    router = Router(routes=routes, redirect_slashes=False, default=_nothing)
    door = Door(
        router,
        state,
        routes=routes,
        public=frozenset(API + one.path for one in endpoints if one.public),
        probes=PROBES,
    )
    return bridge.Border(door, state)


def _route(path: str, one: Endpoint) -> Route:
    route = Route(path, one, methods=[one.method], include_in_schema=False)
    if route.methods is not None and one.gives == sse.MEDIA:
        # Starlette adds it to GET, and would wait for the end of a stream that nobody reads.
        route.methods.discard("HEAD")
    return route


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(
        f"there is nothing at {scope['path']}.",
        hint=f"See {API}/openapi.json for what there is.",
        kind="path",
        name=scope["path"],
    )
