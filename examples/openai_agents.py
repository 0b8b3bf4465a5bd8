"""An agent of OpenAI's Agents SDK that works in a sandbox on this machine."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from agents.extensions.sandbox.cloudflare import (
    CloudflareSandboxClient,
    CloudflareSandboxClientOptions,
)
from agents.items import ModelResponse, TResponseStreamEvent
from agents.models.interface import Model
from agents.run import Runner
from agents.run_config import RunConfig, SandboxRunConfig
from agents.sandbox import Manifest, SandboxAgent
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.usage import Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

SALES = b"month,units\njan,12\nfeb,30\nmar,25\n"
SUM = "awk -F, 'NR > 1 {sum += $2} END {print sum}' sales.csv"


class ScriptedModel(Model):
    """Scripted model, so that the example needs no API key and no network."""

    async def get_response(
        self, system_instructions: Any, input: Any, *_: Any, **__: Any
    ) -> ModelResponse:
        results = [item["output"] for item in input if item.get("type") == "function_call_output"]
        if not results:
            # The command runs in a terminal that stays open: return after one second.
            arguments = json.dumps({"cmd": SUM, "yield_time_ms": 1000})
            call = ResponseFunctionToolCall(
                type="function_call", name="exec_command", arguments=arguments, call_id="1"
            )
            return ModelResponse(output=[call], usage=Usage(), response_id=None)
        print(f"$ {SUM}")
        units = next(line for line in results[0].splitlines() if line.isdigit())
        text = ResponseOutputText(
            type="output_text", text=f"{units} units were sold.", annotations=[]
        )
        message = ResponseOutputMessage(
            id="2", type="message", role="assistant", status="completed", content=[text]
        )
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


async def main() -> None:
    agent = SandboxAgent(
        name="analyst",
        model=ScriptedModel(),
        instructions="Answer from the files in the workspace.",
        default_manifest=Manifest(entries={"sales.csv": File(content=SALES)}),
        capabilities=[Shell()],
    )
    # With `smokebox serve` the URL is http://127.0.0.1:8700.
    with tempfile.TemporaryDirectory() as home:
        async with run_server(ServerSettings(home=home, host="127.0.0.1")) as server:
            assert server.url is not None
            sandbox = SandboxRunConfig(
                client=CloudflareSandboxClient(),
                options=CloudflareSandboxClientOptions(worker_url=server.url),
            )
            result = await Runner.run(
                agent,
                "How many units did we sell?",
                run_config=RunConfig(sandbox=sandbox, tracing_disabled=True),
            )
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
