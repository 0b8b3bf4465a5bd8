"""Preview URLs of Vite and FastAPI apps, opened in a browser.

Screenshots are saved in the directory `artifacts`.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from packaging.requirements import Requirement

from browser import open_browser
from smokebox.client.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.client.sandbox import Sandbox
    from smokebox.server.server import RunningServer

pytestmark = pytest.mark.timeout(180)

# Installed by `make test`, with npm.
VITE = Path(sys.prefix) / "vite" / "node_modules"
INDEX = """<!doctype html>
<title>Vite</title>
<link rel="icon" href="data:,">
<body style="font: 2rem sans-serif; margin: 3rem">
<p id="message"></p><p id="state"></p>
<script type="module" src="/main.js"></script>
"""
MAIN = """
import { message } from "./message.js";
const show = (message) => { document.getElementById("message").textContent = message; };
show(message);
document.getElementById("state").textContent ||= "initial";
import.meta.hot.accept("./message.js", (changed) => show(changed.message));
"""
APP = """
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import HTMLResponse

app = FastAPI()
PAGE = '''<!doctype html>
<title>FastAPI</title>
<link rel="icon" href="data:,">
<body style="font: 2rem sans-serif; margin: 3rem">
<p id="echo"></p><p id="item"></p>
<script>
  const socket = new WebSocket(location.origin.replace("http", "ws") + "/ws");
  socket.onopen = () => socket.send("hello");
  socket.onmessage = (event) => { document.getElementById("echo").textContent = event.data; };
  fetch("/items/7?q=x").then((response) => response.json()).then((item) => {
    document.getElementById("item").textContent = JSON.stringify(item);
  });
</script>'''


@app.get("/")
async def page() -> HTMLResponse:
    response = HTMLResponse(PAGE)
    response.set_cookie("visit", "1", httponly=True)
    return response


@app.get("/items/{number}")
async def item(number: int, q: str, request: Request) -> dict[str, object]:
    return {"number": number, "q": q, "cookie": request.cookies.get("visit")}


@app.websocket("/ws")
async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(f"echo: {text}")
"""

# Requests the list of sandboxes, and tries each kind of request of a page that would create one.
ATTACKER = """<!doctype html>
<title>running</title>
<p id="results"></p>
<script>
  const api = "SERVER/api/sandboxes";
  const requests = [
    [api, {credentials: "include"}],
    [`${api}/evil`, {method: "PUT", body: "{}", headers: {"content-type": "application/json"}}],
    [`${api}/evil`, {method: "POST", body: "{}", mode: "no-cors", credentials: "include"}],
    [api, {method: "POST", body: "{}", headers: {"content-type": "text/plain"}}],
  ];
  (async () => {
    const results = [];
    for (const [url, options] of requests) {
      const request = fetch(url, options);
      results.push(await request.then((got) => got.status || "refused", () => "refused"));
    }
    document.getElementById("results").textContent = results.join(" ");
    document.title = "finished";
  })();
</script>
"""


@pytest_asyncio.fixture
async def sandbox(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with connect(f"unix:{server.socket}") as client, await client.create() as sandbox:
        yield sandbox


async def test_vite_replaces_modules_and_reloads_pages_in_the_browser(sandbox: Sandbox) -> None:
    if not VITE.is_dir():
        pytest.skip("Vite is not installed: make test does that, with npm")
    await sandbox.upload(VITE, "site/node_modules")
    await sandbox.write_file("site/index.html", INDEX)
    await sandbox.write_file("site/main.js", MAIN)
    await sandbox.write_file("site/message.js", "export const message = 'before';\n")
    vite = ["node", "node_modules/vite/bin/vite.js", "--port", "5173", "--strictPort"]
    process = await sandbox.start_process(vite, cwd="/workspace/site")
    await process.wait_for_port(5173, timeout=60)
    async with open_browser() as page:
        await page.navigate(await sandbox.get_preview_url(5173))
        await page.wait_for("document.getElementById('message')?.textContent", "before")
        await page.wait_for("document.getElementById('state').textContent", "initial")
        # Lost when the page is reloaded, and kept when a module is replaced.
        await page.run("document.getElementById('state').textContent = 'edited'")
        await page.screenshot("vite-before")
        await sandbox.write_file("site/message.js", "export const message = 'after';\n")
        await page.wait_for("document.getElementById('message').textContent", "after")
        assert await page.run("document.getElementById('state').textContent") == "edited"
        await page.screenshot("vite-after")
        await sandbox.write_file("site/index.html", INDEX.replace(">Vite<", ">Reloaded<"))
        await page.wait_for("document.title", "Reloaded")
        await page.wait_for("document.getElementById('state').textContent", "initial")


def with_dependencies(*names: str) -> list[Distribution]:
    """Return installed libraries and all their dependencies."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        one = distribution(waiting.pop())
        if one.name not in found:
            found[one.name] = one
            deps = map(Requirement, one.requires or [])
            waiting += [n.name for n in deps if not n.marker or n.marker.evaluate({"extra": ""})]
    return list(found.values())


def copy_modules(library: Distribution, directory: Path) -> None:
    """Copy the modules of a library, without its programs."""
    for file in library.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = directory / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)


async def test_fastapi_app_and_its_websocket_work_in_the_browser(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    version = await sandbox.exec('python3 -c "import sys; print(*sys.version_info[:2])"')
    if tuple(map(int, version.stdout.split())) != sys.version_info[:2]:
        pytest.skip("the libraries of this Python do not work with the Python of the sandbox")
    for library in with_dependencies("fastapi", "uvicorn", "websockets"):
        copy_modules(library, tmp_path / "libraries")
    await sandbox.upload(tmp_path / "libraries", "libraries")
    await sandbox.write_file("app.py", APP)
    process = await sandbox.start_process(
        ["python3", "-m", "uvicorn", "app:app", "--port", "8000"],
        env={"PYTHONPATH": "/workspace/libraries"},
    )
    await process.wait_for_port(8000, timeout=60)
    async with open_browser() as page:
        await page.navigate(await sandbox.get_preview_url(8000))
        await page.wait_for("document.getElementById('echo')?.textContent", "echo: hello")
        item = '{"number":7,"q":"x","cookie":"1"}'
        await page.wait_for("document.getElementById('item').textContent", item)
        assert await page.run("location.search + document.referrer") == ""
        assert await page.run("document.cookie") == ""
        await page.screenshot("fastapi")


async def test_browser_shows_whether_a_preview_is_not_ready_or_not_found(
    sandbox: Sandbox,
) -> None:
    url = await sandbox.get_preview_url(9000)
    async with open_browser() as page:
        await page.navigate(url)
        await page.wait_for("document.querySelector('h1')?.innerText", "Nothing responds yet")
        await page.screenshot("preview-not-ready")
        # The page reloads itself until the port responds.
        await sandbox.start_process(["python3", "-m", "http.server", "9000"])
        await page.wait_for("document.querySelector('h1')?.innerText", "Directory listing for /")
        await sandbox.unexpose_port(9000)
        await page.navigate(url)
        await page.wait_for("document.querySelector('h1')?.innerText", "Preview not found")
        await page.screenshot("preview-not-found")


async def test_page_of_a_sandbox_cannot_reach_the_api(
    server: RunningServer, server_url: str, sandbox: Sandbox
) -> None:
    await sandbox.write_file("index.html", ATTACKER.replace("SERVER", server_url))
    process = await sandbox.start_process(["python3", "-m", "http.server", "9000"])
    await process.wait_for_port(9000, timeout=60)
    exposed = await sandbox.expose_port(9000)
    path_url = f"{server_url}/p/{sandbox.id}/9000/{exposed.token}/"
    async with open_browser() as page:
        for url in (exposed.url, path_url):
            await page.navigate(url)
            await page.wait_for("document.title", "finished")
            results = await page.run("document.getElementById('results').textContent")
            assert set(results.split()) <= {"refused", "403"}, (url, results)
    async with connect(f"unix:{server.socket}") as client:
        assert [one.id for one in await client.list()] == [sandbox.id]
