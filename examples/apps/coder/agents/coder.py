"""Write a web page in a Linux sandbox, and serve it at a preview URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox import create_agent, get_sandbox, tool
from smokebox.testing import ScriptedModel, call, last_returns

if TYPE_CHECKING:
    from smokebox.agents.agent import AgentContext


@create_agent
def coder(ctx: AgentContext) -> dict[str, Any]:
    """Use one sandbox for each conversation, by its id."""
    sandbox = get_sandbox(ctx.env.Linux, ctx.id)

    @tool
    async def show(port: int) -> str:
        """Serve the workspace on a port, and return its preview URL."""
        server = await sandbox.start_process(["python3", "-m", "http.server", str(port)])
        await server.wait_for_port(port)
        return str(await sandbox.get_preview_url(port))

    model = ScriptedModel(
        call("write", path="index.html", content="<h1>Hello from a sandbox</h1>\n"),
        call("show", port=8080),
        lambda request: f"It is at {last_returns(request)[0].text}",
    )
    return {"model": model, "sandbox": sandbox, "cwd": "/workspace", "tools": [show]}
