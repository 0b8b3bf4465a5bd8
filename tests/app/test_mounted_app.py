"""An app mounted in another: under a prefix, with and without its lifespan, behind a proxy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.routing import Mount

from app.site import ECHO, app_of, project, serve_asgi
from smokebox.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from app.site import Site


async def check_served_under(site: Site, prefix: str) -> None:
    """Check that work is accepted and its URLs are reachable for a client."""
    accepted = await site.send("echo/one", "hello")
    assert accepted.body["stream_url"] == f"{prefix}/agents/echo/one"
    assert accepted.headers["location"].startswith(f"{prefix}/submissions/")
    done = await site.outcome(accepted.body["submission_id"])
    assert done["result"]["text"] == "echo: hello"
    assert (await site.get("/agents")).body["agents"][0]["url"] == f"{prefix}/agents/echo"


async def test_mount_without_lifespan(folder: Path) -> None:
    """Work starts with the first request."""
    site = FastAPI()
    work = create_app(folder)
    site.mount("/work", work)
    async with serve_asgi(site, root="/work") as below:
        await check_served_under(below, "/work")
    await app_of(work).stop()


async def test_mount_with_lifespan(folder: Path) -> None:
    work = create_app(folder)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with work.router.lifespan_context(work):
            yield

    site = Starlette(routes=[Mount("/deep", routes=[Mount("/work", work)])], lifespan=lifespan)
    async with serve_asgi(site, root="/deep/work") as below:
        assert app_of(work).started
        await check_served_under(below, "/deep/work")
    assert not app_of(work).started


async def test_accepted_work_continues_at_startup_with_the_lifespan(folder: Path) -> None:
    first = create_app(folder)
    async with serve_asgi(first) as site:
        id = (await site.send("echo/one", "wait go")).body["submission_id"]
        await site.wait_until_running(id)
        await app_of(first).stop(grace=0)
    (folder / "go").touch()
    async with serve_asgi(create_app(folder)) as site:
        done = await site.outcome(id)
        assert (done["outcome"], done["result"]["text"]) == ("completed", "echo: wait go")


async def test_middleware_of_the_outer_app_applies(folder: Path) -> None:
    site = FastAPI()
    site.mount("/work", create_app(folder))

    @site.middleware("http")
    async def guard(request: Request, call_next: Any) -> Any:
        if request.headers.get("x-user") != "ann":
            from starlette.responses import JSONResponse

            return JSONResponse({"error": {"code": "unauthorized"}}, 401)
        return await call_next(request)

    async with serve_asgi(site, root="/work") as below:
        assert (await below.send("echo/one", "hello")).status == 401
        response = await below.send("echo/one?wait=result", "hello", headers={"x-user": "ann"})
        assert response.status == 200
    await app_of(site.routes[-1].app).stop()  # type: ignore[attr-defined]


async def test_user_routes_are_served_beside_it(tmp_path: Path) -> None:
    """`app.py` is served below our routes, with its own startup and shutdown."""
    text = """
    import contextlib
    from fastapi import FastAPI
    from smokebox.app import dispatch

    happened = []

    @contextlib.asynccontextmanager
    async def lifespan(app):
        happened.append("start")
        yield
        happened.append("end")

    app = FastAPI(lifespan=lifespan)

    @app.get("/own")
    async def own():
        return {"happened": happened, "sent": await dispatch("echo", id="own", input="hello")}
    """
    folder = project(tmp_path / "p", agents__echo=ECHO, app=text)
    async with serve_asgi(create_app(folder)) as site:
        found = (await site.get("/own")).body
        assert found["happened"] == ["start"]
        assert (await site.outcome(found["sent"]))["outcome"] == "completed"
        assert (await site.get("/agents")).status == 200


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_app_works_with_an_event_loop_per_request(folder: Path) -> None:
    """FastAPI's client does so without a `with` block."""
    site = FastAPI()

    def user(request: Request) -> None:
        if "x-user" not in request.headers:
            raise HTTPException(401)

    @site.get("/me", dependencies=[Depends(user)])
    async def me() -> dict[str, str]:
        return {"name": "ann"}

    site.mount("/work", create_app(folder))
    client = TestClient(site)
    sent = client.post("/work/agents/echo/one", json={"message": "hello"}).json()
    done = client.get(f"{sent['url']}?wait=30").json()
    assert done["result"]["text"] == "echo: hello"
    again = client.post("/work/agents/echo/one?wait=result", json={"message": "on"}).json()
    assert again["result"]["text"] == "echo: on"
    assert client.get("/me").status_code == 401
