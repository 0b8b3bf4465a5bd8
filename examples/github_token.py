"""A token that the egress proxy adds to requests, and that is not visible in the sandbox.

    python examples/github_token.py

The class is the same as for GitHub. So that this runs anywhere, its requests are sent to a fake
GitHub on this machine, which accepts one token.
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

TOKEN = "ghp_example_4711"


class FakeGitHub(BaseHTTPRequestHandler):
    """Replacement for api.github.com in this example."""

    def do_GET(self) -> None:
        """Check the token, and echo it, as a careless server does."""
        credentials = self.headers.get("authorization", "")
        valid = credentials == f"Bearer {TOKEN}"
        self.send_response(200 if valid else 401)
        self.end_headers()
        body = f"login: octocat, by {credentials}\n" if valid else "unauthorized\n"
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


fake_github = ThreadingHTTPServer(("127.0.0.1", 0), FakeGitHub)


async def add_github_token(request: Request, env: Any, context: HandlerContext) -> Response:
    """Add the token; runs in this process. For GitHub itself: `return request`."""
    request.headers["authorization"] = f"Bearer {env.GITHUB_TOKEN}"
    return await context.forward(request, to=f"http://127.0.0.1:{fake_github.server_port}")


class GitHubSandbox(Sandbox):
    """A sandbox that can reach one host, through a handler."""

    outbound_by_host = {"api.github.com": add_github_token}  # noqa: RUF012


async def main() -> None:
    """Send requests from the sandbox, and search it for the token."""
    os.environ["GITHUB_TOKEN"] = TOKEN
    sandbox = get_sandbox(GitHubSandbox, "github-example")
    user = await sandbox.exec("curl -sS https://api.github.com/user")
    print(user.stdout, end="")
    assert "octocat" in user.stdout
    search = f"(env; cat /proc/*/environ; curl -sS https://api.github.com/user) | grep -ac {TOKEN}"
    print("occurrences inside:", (await sandbox.exec(search)).stdout, end="")
    other = await sandbox.exec("curl -sS https://example.com/")
    print("other hosts:", other.stderr, end="")
    for event in await sandbox.network_log():
        print(event.verdict, event.host, event.status or "", event.rule)
    await sandbox.destroy()


if __name__ == "__main__":
    threading.Thread(target=fake_github.serve_forever, daemon=True).start()
    asyncio.run(main())
    fake_github.shutdown()
    fake_github.server_close()
