"""Triage issues: GitHub sends a signed webhook, and an agent adds a label.

The agent works in a Linux sandbox that can reach one host. The GitHub token is added to its
requests outside the sandbox, and is not visible inside.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from smokebox import Sandbox, get_sandbox
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext
    from smokebox.egress import HandlerContext, Request, Response

triggers = {"webhook": {"verify": "github", "secret": "GITHUB_WEBHOOK_SECRET"}}


async def add_github_token(request: Request, env: Any, context: HandlerContext) -> Response:
    """Add the token. For GitHub itself: `return request`; here a fake receives it."""
    request.headers["authorization"] = f"Bearer {env.GITHUB_TOKEN}"
    return await context.forward(request, to=os.environ["GITHUB_URL"])


class GitHubSandbox(Sandbox):
    """A sandbox that can reach one host, through a handler."""

    outbound_by_host = {"api.github.com": add_github_token}  # noqa: RUF012


async def handler(ctx: WorkflowContext) -> str:
    """Handle an opened issue."""
    number = ctx.payload["issue"]["number"]
    api = f"https://api.github.com/repos/acme/shop/issues/{number}"
    model = ScriptedModel(
        call("bash", command=f"curl -sS {api}"),
        call("bash", command=f'curl -sS -X POST {api}/labels -d \'{{"labels": ["bug"]}}\''),
        "A crash: I labelled it as a bug.",
    )
    async with get_sandbox(GitHubSandbox, f"issue-{number}") as sandbox:
        harness = await ctx.init(model=model, sandbox=sandbox)
        session = await harness.session()
        reply = await session.prompt(f"Triage issue {number}: {ctx.payload['issue']['title']}")
    return str(reply)
