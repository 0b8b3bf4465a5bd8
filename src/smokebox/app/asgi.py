"""ASGI interface of an app, to serve or to mount in another app."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketClose

from smokebox.app.app import App
from smokebox.app.definitions import ServedAgent
from smokebox.app.request import endpoint, error_response, json_response
from smokebox.app.routes import agents, submissions, workflows
from smokebox.errors import NotFound
from smokebox.wire.failure import failure_of
from smokebox.wire.submissions import Index, ServedInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from smokebox.app.project import Served
    from smokebox.app.request import AppRequest


def create_app(
    folder: str | Path = ".", *, keys: Sequence[str] | None = None, strict: bool = True
) -> Starlette:
    """Return the agents and workflows of a folder as an ASGI app.

    Serve it by itself, or mount it: `site.mount("/work", create_app("."))`. A mounted app resumes
    its work with the first request, or at startup if the outer app runs its `lifespan`.

    Args:
        folder: The project.
        keys: API keys that give access, by default those of SMOKEBOX_APP_KEYS.
        strict: Raise the error of a file that cannot be loaded, instead of skipping it.
    """
    return asgi(App(folder, strict=strict, keys=None if keys is None else tuple(keys)))


def asgi(app: App) -> Starlette:
    """Return the ASGI interface of an app."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await app.start()
        try:
            async with _lifespan_of(app.project.site):
                yield
        finally:
            await app.stop()

    async def site(scope: Scope, receive: Receive, send: Send) -> None:
        # Looked up per request: a reload replaces it.
        await (app.project.site or _not_found)(scope, receive, send)

    served = Starlette(routes=[*_routes(app), Mount("/", site)], lifespan=lifespan)
    served.state.smokebox = app
    return served


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    error = NotFound(
        f"there is no route {scope.get('method', 'WebSocket')} {scope['path']!r:.200}.",
        hint="GET /agents and GET /workflows list what is served.",
        kind="path",
        name=scope["path"],
    )
    if scope["type"] == "websocket":
        await WebSocketClose()(scope, receive, send)
    else:
        await error_response(failure_of(error), 404)(scope, receive, send)


def _lifespan_of(site: Any) -> AbstractAsyncContextManager[object]:
    """Return the lifespan of the user's ASGI app, which a mount does not run."""
    router = getattr(site, "router", None)
    return contextlib.nullcontext() if router is None else router.lifespan_context(site)


def _routes(app: App) -> list[BaseRoute]:
    conversation, run = "/agents/{name}/{id}", "/runs/{id}"
    return [
        endpoint(app, "GET", "/health", _health, guarded=False),
        endpoint(app, "GET", "/agents", _index),
        endpoint(app, "GET", "/workflows", _index),
        endpoint(app, "GET", "/agents/{name}", agents.conversations),
        endpoint(app, "POST", conversation, agents.post, guarded=False),
        endpoint(app, "GET", conversation, agents.get),
        endpoint(app, "DELETE", conversation, agents.delete),
        endpoint(app, "POST", f"{conversation}/abort", agents.abort),
        endpoint(app, "POST", f"{conversation}/approvals/{{call_id}}", agents.decide),
        endpoint(app, "POST", "/workflows/{name}", workflows.post, guarded=False),
        endpoint(app, "GET", "/workflows/{name}", workflows.runs),
        endpoint(app, "GET", run, workflows.get),
        endpoint(app, "GET", f"{run}/events", workflows.events),
        endpoint(app, "POST", f"{run}/abort", workflows.abort),
        endpoint(app, "GET", "/submissions/{submission}", submissions.get),
    ]


async def _health(request: AppRequest) -> Response:
    """Report that the app is running."""
    return json_response({"status": "ok", "open": await request.app.inbox.count_open()})


async def _index(request: AppRequest) -> Response:
    """List the agents and workflows."""
    project = request.app.project
    return json_response(
        Index(
            _infos(request, "agents", project.agents),
            _infos(request, "workflows", project.workflows),
        )
    )


def _infos(request: AppRequest, kind: str, served: Mapping[str, Served]) -> list[ServedInfo]:
    found = [
        ServedInfo(
            name=name,
            url=request.url(f"/{kind}/{name}"),
            description=one.agent.description if isinstance(one, ServedAgent) else "",
            schedule=None
            if isinstance(one, ServedAgent) or one.schedule is None
            else str(one.schedule),
        )
        for name, one in served.items()
    ]
    faults = request.app.project.faults.items()
    return found + [
        ServedInfo(name=file.stem, url=request.url(f"/{kind}/{file.stem}"), error=str(fault))
        for file, fault in faults
        if file.parent.name == kind
    ]
