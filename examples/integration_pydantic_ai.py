"""A Pydantic AI agent whose workspace is a virtual sandbox."""

import asyncio

from pydantic_ai import Agent, ModelMessage, ModelResponse, RunContext, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from smokebox import virtual
from smokebox.integrations.pydantic_ai import SmokeboxWorkspace

SALES = "month,units\njan,12\nfeb,30\nmar,25\n"
SUM = "awk -F, 'NR > 1 {sum += $2} END {print sum}' sales.csv"


def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Return scripted responses, so that the example needs no API key and no network."""
    if len(messages) == 1:
        return ModelResponse(parts=[ToolCallPart("run", {"command": SUM})])
    return ModelResponse(parts=[TextPart("67 units were sold.")])


agent = Agent(FunctionModel(script))


@agent.tool
async def run(ctx: RunContext[object], command: str) -> str:
    """Run a shell command in the workspace."""
    result = await ctx.workspace.run(command, shell=True, timeout=60)
    print(f"$ {command}\n{result.stdout}", end="")
    return result.stdout + result.stderr


async def main() -> None:
    async with virtual(files={"/workspace/sales.csv": SALES}) as sandbox:
        workspace = SmokeboxWorkspace(sandbox)
        result = await agent.run("How many units did we sell?", workspace=workspace)
        print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
