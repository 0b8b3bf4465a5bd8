"""Two shell commands written in Python: a plain one, and one that streams."""

import asyncio
import json

from smokebox import virtual
from smokebox.sandbox.virtual.command import CommandCall, CommandOutput, CommandStream

STOCK = {"apples": 12, "pears": 0, "plums": 7}


def stock(call: CommandCall) -> str | CommandOutput:
    """`stock` prints all items as JSON, `stock NAME` the count of one."""
    if not call.args:
        return json.dumps(STOCK) + "\n"
    name = call.args[0]
    if name not in STOCK:
        return CommandOutput(stderr=f"stock: no such item: {name}\n", exit_code=1)
    return f"{STOCK[name]}\n"


async def slowly(call: CommandStream) -> int:
    """`slowly SECONDS` copies its input to its output, waiting before each line."""
    delay = float(call.args[0]) if call.args else 0.1
    for line in (await call.read()).splitlines(keepends=True):
        await asyncio.sleep(delay)
        await call.write(line)
    return 0


SCRIPTS = [
    "stock | jq -r 'to_entries[] | select(.value > 0) | .key'",
    "stock rum || echo 'exit code' $?",
    "stock | jq -r 'keys[]' | slowly 0.05",
    # The timeout kills the command, and the script continues.
    "seq 100 | timeout 0.2 slowly 0.06; echo 'exit code' $?",
]


async def main() -> None:
    async with virtual(commands={"stock": stock, "slowly": slowly}) as sandbox:
        for script in SCRIPTS:
            print(f"$ {script}")
            stream = sandbox.exec_stream(script)
            async for chunk in stream:
                print(chunk.data, end="")


asyncio.run(main())
