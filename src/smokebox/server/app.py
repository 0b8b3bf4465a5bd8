"""Wires the app together: endpoints, what other clients speak, and the door before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route, Router

from smokebox.errors import NotFound
from smokebox.server.door import Door
from smokebox.server.routes import all_endpoints
from smokebox.wire import API

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from smokebox.server.state import State


def create_app(state: State) -> ASGIApp:
    """The server of one engine, as an ASGI app."""
    routes = [
        Route(API + one.path, one, methods=[one.method], include_in_schema=False)
        for one in all_endpoints()
    ]
    router = Router(routes=routes, redirect_slashes=False, default=_nothing)
    return Door(router, state)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(
        f"there is nothing at {scope['path']}.",
        hint=f"See {API}/openapi.json for what there is.",
        kind="path",
        name=scope["path"],
    )
