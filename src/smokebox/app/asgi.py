"""An app as ASGI: to be served, or mounted in an app of one's own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketClose

from smokebox.app.app import App
from smokebox.app.call import answer, endpoint, refusal
from smokebox.app.routes import agents, submissions, workflows
from smokebox.app.served import ServedAgent
from smokebox.errors import NotFound
from smokebox.wire.failure import failure_of
from smokebox.wire.work import Index, ServedInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from smokebox.app.call import Call
    from smokebox.app.project import Served


def create_app(
    folder: str | Path = ".", *, keys: Sequence[str] | None = None, strict: bool = True
) -> Starlette:
    """The agents and workflows of a folder as an ASGI app.

    Serve it by itself, or mount it: `site.mount("/work", create_app("."))`. Whoever mounts it
    has its work go on at the start, too, by running its `lifespan`; else it begins with the
    first request. `keys` are what opens it, by default those of SMOKEBOX_APP_KEYS.
    """
    return asgi(App(folder, strict=strict, keys=None if keys is None else tuple(keys)))


def asgi(app: App) -> Starlette:
    """That app as ASGI."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await app.start()
        try:
            async with _lifespan_of(app.project.site):
                yield
        finally:
            await app.stop()

    async def site(scope: Scope, receive: Receive, send: Send) -> None:
        # That of the moment: the files of a project that is worked on change.
        await (app.project.site or _nothing)(scope, receive, send)

    made = Starlette(routes=[*_routes(app), Mount("/", site)], lifespan=lifespan)
    made.state.smokebox = app
    return made


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """What there is where neither we nor the user have something."""
    error = NotFound(
        f"there is no {scope.get('method', 'WebSocket')} {scope['path']!r:.200} here.",
        hint="GET /agents and GET /workflows say what there is.",
        kind="path",
        name=scope["path"],
    )
    refused = WebSocketClose() if scope["type"] == "websocket" else refusal(failure_of(error), 404)
    await refused(scope, receive, send)


def _lifespan_of(site: Any) -> AbstractAsyncContextManager[object]:
    """What the user's own app does at its start and its end, which nobody does for a mount."""
    router = getattr(site, "router", None)
    return contextlib.nullcontext() if router is None else router.lifespan_context(site)


def _routes(app: App) -> list[BaseRoute]:
    one, run = "/agents/{name}/{id}", "/runs/{id}"
    return [
        endpoint(app, "GET", "/health", _health, guarded=False),
        endpoint(app, "GET", "/agents", _index),
        endpoint(app, "GET", "/workflows", _index),
        endpoint(app, "GET", "/agents/{name}", agents.conversations),
        endpoint(app, "POST", one, agents.post, guarded=False),
        endpoint(app, "GET", one, agents.get),
        endpoint(app, "DELETE", one, agents.delete),
        endpoint(app, "POST", f"{one}/abort", agents.abort),
        endpoint(app, "POST", f"{one}/approvals/{{call_id}}", agents.decide),
        endpoint(app, "POST", "/workflows/{name}", workflows.post, guarded=False),
        endpoint(app, "GET", "/workflows/{name}", workflows.runs),
        endpoint(app, "GET", run, workflows.get),
        endpoint(app, "GET", f"{run}/events", workflows.events),
        endpoint(app, "POST", f"{run}/abort", workflows.abort),
        endpoint(app, "GET", "/submissions/{submission}", submissions.get),
    ]


async def _health(call: Call) -> Response:
    """Whether it works."""
    return answer({"status": "ok", "open": await call.app.inbox.open()})


async def _index(call: Call) -> Response:
    """What is served."""
    project = call.app.project
    return answer(
        Index(
            _infos(call, "agents", project.agents),
            _infos(call, "workflows", project.workflows),
        )
    )


def _infos(call: Call, kind: str, served: Mapping[str, Served]) -> list[ServedInfo]:
    found = [
        ServedInfo(
            name=name,
            url=call.url(f"/{kind}/{name}"),
            description=one.agent.description if isinstance(one, ServedAgent) else "",
            schedule=None
            if isinstance(one, ServedAgent) or one.schedule is None
            else str(one.schedule),
        )
        for name, one in served.items()
    ]
    faults = call.app.project.faults.items()
    return found + [
        ServedInfo(name=file.stem, url=call.url(f"/{kind}/{file.stem}"), error=str(fault))
        for file, fault in faults
        if file.parent.name == kind
    ]
