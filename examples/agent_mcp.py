"""An agent with the tools of an MCP server, which is part of this program.

Any server works: `command="uvx mcp-server-git"`, or `url="https://..."`. The model is scripted, so
that this runs without an API key. Needs smokebox[mcp].
"""

import asyncio
import sys

from smokebox import create_agent, init
from smokebox.agents.events import ToolEnd
from smokebox.agents.tools.mcp import MCPServer
from smokebox.testing import ScriptedModel, call, last_returns

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("library", log_level="ERROR")
BOOKS = {"Moby-Dick": "Melville", "Emma": "Austen"}


@server.tool()
def author_of(title: str) -> str:
    "Return the author of a book."
    return BOOKS[title]


server.run()
"""

librarian = create_agent(
    model=ScriptedModel(
        call("library__author_of", title="Emma"),
        lambda request: f"{last_returns(request)[0].text} wrote it.",
    ),
    tools=[MCPServer(name="library", command=[sys.executable, "-c", SERVER])],
    sandbox=None,
)


async def main() -> None:
    async with init(librarian) as harness:
        print("tools:", ", ".join(tool.name for tool in harness.tools))
        work = (await harness.session()).prompt("Who wrote Emma?")
        async for event in work:
            if isinstance(event, ToolEnd):
                print(f"{event.name}: {event.text}")
        print((await work).text)


asyncio.run(main())
