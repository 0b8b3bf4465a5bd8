"""A token that is added at the door of a sandbox, and that nobody inside can find.

    python examples/github_token.py

The class is as it would be for GitHub itself. So that this runs anywhere, its requests are sent
to a stand-in on this machine, which knows one token and tells whom it belongs to.
"""

from __future__ import annotations

import asyncio
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from smokebox import Sandbox, get_sandbox

if TYPE_CHECKING:
    from smokebox.egress import HandlerContext, Request, Response

TOKEN = "ghp_of_the_example_4711"


class StandIn(BaseHTTPRequestHandler):
    """What api.github.com is in this example."""

    def do_GET(self) -> None:
        """Answer who has the token, and tell it back, as a careless server does."""
        told = self.headers.get("authorization", "")
        known = told == f"Bearer {TOKEN}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(f"login: octocat, by {told}\n".encode() if known else b"who are you?\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


stand_in = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)


async def add_github_token(request: Request, env: Any, context: HandlerContext) -> Response:
    """Runs in this process, where the token is. For GitHub itself: `return request`."""
    request.headers["authorization"] = f"Bearer {env.GITHUB_TOKEN}"
    return await context.forward(request, to=f"http://127.0.0.1:{stand_in.server_port}")


class GitHubSandbox(Sandbox):
    """May reach one host, by a handler."""

    outbound_by_host = {"api.github.com": add_github_token}  # noqa: RUF012


async def main() -> None:
    """Use the token from inside, and look for it."""
    os.environ["GITHUB_TOKEN"] = TOKEN
    sandbox = get_sandbox(GitHubSandbox, "github-example")
    user = await sandbox.exec("curl -sS https://api.github.com/user")
    print(user.stdout, end="")
    assert "octocat" in user.stdout
    search = f"(env; cat /proc/*/environ; curl -sS https://api.github.com/user) | grep -ac {TOKEN}"
    print("seen inside:", (await sandbox.exec(search)).stdout, end="")
    other = await sandbox.exec("curl -sS https://example.com/")
    print("elsewhere:", other.stderr, end="")
    for event in await sandbox.network_log():
        print(event.verdict, event.host, event.status or "", event.rule)
    await sandbox.destroy()


if __name__ == "__main__":
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()
    asyncio.run(main())
    stand_in.shutdown()
    stand_in.server_close()
