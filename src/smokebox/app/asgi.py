"""ASGI interface of an app, to serve or to mount in another app."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketClose

from smokebox.app.app import App
from smokebox.app.definitions import ServedAgent
from smokebox.app.endpoint import AppEndpoint
from smokebox.app.request import error_response, json_response
from smokebox.app.routes import agents, submissions, workflows
from smokebox.errors import NotFound
from smokebox.wire.failure import failure_of
from smokebox.wire.submissions import Index, ServedInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from starlette.responses import Response
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
        keys: Keys of operators, by default those of SMOKEBOX_APP_KEYS. With any, each request needs
            one of them, or a key of `smokebox keys create`. Without, your app checks requests.
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

    served = Starlette(
        routes=[*(one.route(app) for one in ENDPOINTS), Mount("/", site)], lifespan=lifespan
    )
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


async def _health(request: AppRequest) -> Response:
    """Report that the app is running."""
    return json_response({"status": "ok", "open": await request.app.inbox.count_open()})


async def _index(request: AppRequest) -> Response:
    """List the agents and workflows that the sender may read."""
    project, scopes = request.app.project, request.principal.scopes
    return json_response(
        Index(
            _infos(request, "agents", project.agents) if "agents:read" in scopes else [],
            _infos(request, "workflows", project.workflows) if "runs:read" in scopes else [],
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


_CONVERSATION, _RUN = "/agents/{name}/{id}", "/runs/{id}"
_CONVERSATIONS, _RUNS = "conversations", "runs"
_READS, _WRITES = ("agents:read",), ("agents:write",)
_READS_RUNS, _WRITES_RUNS = ("runs:read",), ("runs:write",)

ENDPOINTS = [
    AppEndpoint(method="GET", path="/health", serve=_health),
    AppEndpoint(method="GET", path="/agents", serve=_index, scopes=_READS),
    AppEndpoint(method="GET", path="/workflows", serve=_index, scopes=_READS_RUNS),
    AppEndpoint(method="GET", path="/agents/{name}", serve=agents.conversations, scopes=_READS),
    AppEndpoint(
        method="POST",
        path=_CONVERSATION,
        serve=agents.post,
        scopes=_WRITES,
        signed=True,
        id_kind=_CONVERSATIONS,
    ),
    AppEndpoint(
        method="GET",
        path=_CONVERSATION,
        serve=agents.get,
        scopes=_READS,
        id_kind=_CONVERSATIONS,
    ),
    AppEndpoint(
        method="DELETE",
        path=_CONVERSATION,
        serve=agents.delete,
        scopes=_WRITES,
        id_kind=_CONVERSATIONS,
    ),
    AppEndpoint(
        method="POST",
        path=f"{_CONVERSATION}/abort",
        serve=agents.abort,
        scopes=_WRITES,
        id_kind=_CONVERSATIONS,
    ),
    AppEndpoint(
        method="POST",
        path=f"{_CONVERSATION}/approvals/{{call_id}}",
        serve=agents.decide,
        scopes=("approvals:write",),
        id_kind=_CONVERSATIONS,
    ),
    AppEndpoint(
        method="POST",
        path="/workflows/{name}",
        serve=workflows.post,
        scopes=_WRITES_RUNS,
        signed=True,
    ),
    AppEndpoint(method="GET", path="/workflows/{name}", serve=workflows.runs, scopes=_READS_RUNS),
    AppEndpoint(method="GET", path=_RUN, serve=workflows.get, scopes=_READS_RUNS, id_kind=_RUNS),
    AppEndpoint(
        method="GET",
        path=f"{_RUN}/events",
        serve=workflows.events,
        scopes=_READS_RUNS,
        id_kind=_RUNS,
    ),
    AppEndpoint(
        method="POST",
        path=f"{_RUN}/abort",
        serve=workflows.abort,
        scopes=_WRITES_RUNS,
        id_kind=_RUNS,
    ),
    AppEndpoint(
        method="GET",
        path="/submissions/{submission}",
        serve=submissions.get,
        scopes=(*_READS, *_READS_RUNS),
    ),
]
"""Every endpoint of an app."""
