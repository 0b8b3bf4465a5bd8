"""Apps in a sandbox, used in a browser by their preview URLs: Vite and FastAPI.

What was seen is in the folder `artifacts`.
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

# What `make test` installs by npm.
VITE = Path(sys.prefix) / "vite" / "node_modules"
INDEX = """<!doctype html>
<title>Vite</title>
<link rel="icon" href="data:,">
<body style="font: 2rem sans-serif; margin: 3rem">
<p id="word"></p><p id="typed"></p>
<script type="module" src="/main.js"></script>
"""
MAIN = """
import { word } from "./word.js";
const show = (word) => { document.getElementById("word").textContent = word; };
show(word);
document.getElementById("typed").textContent ||= "loaded once";
import.meta.hot.accept("./word.js", (changed) => show(changed.word));
"""
APP = """
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import HTMLResponse

app = FastAPI()
PAGE = '''<!doctype html>
<title>FastAPI</title>
<link rel="icon" href="data:,">
<body style="font: 2rem sans-serif; margin: 3rem">
<p id="said"></p><p id="items"></p>
<script>
  const socket = new WebSocket(location.origin.replace("http", "ws") + "/ws");
  socket.onopen = () => socket.send("hello");
  socket.onmessage = (event) => { document.getElementById("said").textContent = event.data; };
  fetch("/items/7?q=x").then((answer) => answer.json()).then((item) => {
    document.getElementById("items").textContent = JSON.stringify(item);
  });
</script>'''


@app.get("/")
async def page(response: Response) -> HTMLResponse:
    answer = HTMLResponse(PAGE)
    answer.set_cookie("visit", "1", httponly=True)
    return answer


@app.get("/items/{number}")
async def item(number: int, q: str, request: Request) -> dict[str, object]:
    return {"number": number, "q": q, "cookie": request.cookies.get("visit")}


@app.websocket("/ws")
async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(f"you said {text}")
"""

# Asks for the list of sandboxes, and tries to make one in each way that a page has.
ATTACKER = """<!doctype html>
<title>trying</title>
<p id="found"></p>
<script>
  const api = "SERVER/api/sandboxes";
  const asks = [
    [api, {credentials: "include"}],
    [`${api}/evil`, {method: "PUT", body: "{}", headers: {"content-type": "application/json"}}],
    [`${api}/evil`, {method: "POST", body: "{}", mode: "no-cors", credentials: "include"}],
    [api, {method: "POST", body: "{}", headers: {"content-type": "text/plain"}}],
  ];
  (async () => {
    const found = [];
    for (const [url, options] of asks) {
      found.push(await fetch(url, options).then((got) => got.status || "refused", () => "refused"));
    }
    document.getElementById("found").textContent = found.join(" ");
    document.title = "tried";
  })();
</script>
"""


@pytest_asyncio.fixture
async def sandbox(server: RunningServer) -> AsyncIterator[Sandbox]:
    async with connect(f"unix:{server.socket}") as client, await client.create() as sandbox:
        yield sandbox


async def test_a_vite_server_reloads_its_modules_in_the_browser(sandbox: Sandbox) -> None:
    if not VITE.is_dir():
        pytest.skip("Vite is not installed: make test does that, with npm")
    await sandbox.upload(VITE, "site/node_modules")
    await sandbox.write_file("site/index.html", INDEX)
    await sandbox.write_file("site/main.js", MAIN)
    await sandbox.write_file("site/word.js", "export const word = 'before';\n")
    vite = ["node", "node_modules/vite/bin/vite.js", "--port", "5173", "--strictPort"]
    process = await sandbox.start_process(vite, cwd="/workspace/site")
    await process.wait_for_port(5173, timeout=60)
    async with open_browser() as page:
        await page.navigate(await sandbox.get_preview_url(5173))
        await page.wait_for("document.getElementById('word')?.textContent", "before")
        await page.wait_for("document.getElementById('typed').textContent", "loaded once")
        # A page that is loaded anew forgets this; a module that is replaced does not.
        await page.run("document.getElementById('typed').textContent = 'typed by hand'")
        await page.screenshot("vite-before")
        await sandbox.write_file("site/word.js", "export const word = 'after';\n")
        await page.wait_for("document.getElementById('word').textContent", "after")
        assert await page.run("document.getElementById('typed').textContent") == "typed by hand"
        await page.screenshot("vite-after")
        await sandbox.write_file("site/index.html", INDEX.replace(">Vite<", ">Loaded anew<"))
        await page.wait_for("document.title", "Loaded anew")
        await page.wait_for("document.getElementById('typed').textContent", "loaded once")


def with_needs(*names: str) -> list[Distribution]:
    """Installed libraries, and all that they need."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        one = distribution(waiting.pop())
        if one.name not in found:
            found[one.name] = one
            needs = map(Requirement, one.requires or [])
            waiting += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
    return list(found.values())


def copy(library: Distribution, folder: Path) -> None:
    """Copy the modules of a library, and not its programs."""
    for file in library.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)


async def test_a_fastapi_app_and_its_websocket_work_in_the_browser(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    found = await sandbox.exec('python3 -c "import sys; print(*sys.version_info[:2])"')
    if tuple(map(int, found.stdout.split())) != sys.version_info[:2]:
        pytest.skip("the sandbox has another Python than the libraries of this one are for")
    for needed in with_needs("fastapi", "uvicorn", "websockets"):
        copy(needed, tmp_path / "libraries")
    await sandbox.upload(tmp_path / "libraries", "libraries")
    await sandbox.write_file("app.py", APP)
    process = await sandbox.start_process(
        ["python3", "-m", "uvicorn", "app:app", "--port", "8000"],
        env={"PYTHONPATH": "/workspace/libraries"},
    )
    await process.wait_for_port(8000, timeout=60)
    async with open_browser() as page:
        await page.navigate(await sandbox.get_preview_url(8000))
        await page.wait_for("document.getElementById('said')?.textContent", "you said hello")
        item = '{"number":7,"q":"x","cookie":"1"}'
        await page.wait_for("document.getElementById('items').textContent", item)
        await page.screenshot("fastapi")


async def test_a_browser_is_told_that_nothing_listens_and_that_there_is_nothing(
    sandbox: Sandbox,
) -> None:
    url = await sandbox.get_preview_url(9000)
    async with open_browser() as page:
        await page.navigate(url)
        await page.wait_for("document.querySelector('h1')?.innerText", "Nothing responds yet")
        await page.screenshot("nothing-listens")
        # The page looks again by itself.
        await sandbox.start_process(["python3", "-m", "http.server", "9000"])
        await page.wait_for("document.querySelector('h1')?.innerText", "Directory listing for /")
        await sandbox.unexpose_port(9000)
        await page.navigate(url)
        await page.wait_for("document.querySelector('h1')?.innerText", "Preview not found")
        await page.screenshot("no-such-preview")


async def test_a_page_of_a_sandbox_does_not_reach_the_api(
    server: RunningServer, server_url: str, sandbox: Sandbox
) -> None:
    await sandbox.write_file("index.html", ATTACKER.replace("SERVER", server_url))
    process = await sandbox.start_process(["python3", "-m", "http.server", "9000"])
    await process.wait_for_port(9000, timeout=60)
    exposed = await sandbox.expose_port(9000)
    beside = f"{server_url}/p/{sandbox.id}/9000/{exposed.token}/"
    async with open_browser() as page:
        for url in (exposed.url, beside):
            await page.navigate(url)
            await page.wait_for("document.title", "tried")
            found = await page.run("document.getElementById('found').textContent")
            assert set(found.split()) <= {"refused", "403"}, (url, found)
    async with connect(f"unix:{server.socket}") as client:
        assert [one.id for one in await client.list()] == [sandbox.id]
