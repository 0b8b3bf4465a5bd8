"""What listens in a sandbox, seen at a URL: a page, a URL that expires, and the end of both.

python examples/preview.py
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp

from smokebox import get_sandbox


async def see(url: str) -> str:
    """What a browser would show; it knows that all names below localhost are this machine."""
    parts = urlsplit(url)
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{parts.port}/", headers={"host": parts.netloc}) as answer,
    ):
        return f"{answer.status} {(await answer.text()).strip()[:60]}"


async def main() -> None:
    """Serve a page, show it, and stop showing it."""
    sandbox = get_sandbox("preview-example")
    await sandbox.write_file("site/index.html", "<h1>Hello from a sandbox</h1>\n")
    server = await sandbox.start_process(
        ["python3", "-m", "http.server", "8080"], cwd="/workspace/site"
    )
    await server.wait_for_port(8080)
    exposed = await sandbox.expose_port(8080, name="site")
    print(exposed.url)
    print(await see(exposed.url))
    for_a_minute = await sandbox.get_preview_url(8080, expires_in=60)
    print(await see(for_a_minute))
    await sandbox.unexpose_port(8080)
    print(await see(exposed.url))
    await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
