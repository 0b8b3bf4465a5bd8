"""Preview URLs: a page of a web server in a sandbox, a URL that expires, and unexposing the port.

python examples/preview.py
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from smokebox import get_sandbox


def fetch(url: str) -> str:
    """Return the status and the start of a page.

    Browsers resolve all names below localhost to this machine; urllib needs the address.
    """
    parts = urlsplit(url)
    request = urllib.request.Request(
        f"http://127.0.0.1:{parts.port}{parts.path}?{parts.query}", headers={"host": parts.netloc}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as page:
            return f"{page.status} {page.read().decode().strip()[:60]}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode().strip()[:60]}"


async def main() -> None:
    """Expose a page, fetch it, and unexpose it."""
    sandbox = get_sandbox("preview-example")
    await sandbox.write_file("site/index.html", "<h1>Hello from a sandbox</h1>\n")
    server = await sandbox.start_process(
        ["python3", "-m", "http.server", "8080"], cwd="/workspace/site"
    )
    await server.wait_for_port(8080)
    exposed = await sandbox.expose_port(8080, name="site")
    print(exposed.url)
    print(await asyncio.to_thread(fetch, exposed.url))
    expiring = await sandbox.get_preview_url(8080, expires_in=60)
    print(await asyncio.to_thread(fetch, expiring))
    await sandbox.unexpose_port(8080)
    print(await asyncio.to_thread(fetch, exposed.url))
    await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
