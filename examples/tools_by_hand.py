"""Plays the part of the model: finds a bug, mends it and runs the program, tool by tool."""

import asyncio

from smokebox import virtual
from smokebox.agents.tools import workspace_tools

FILES = {
    "/workspace/greet.sh": 'name=${1:-wrold}\necho "Hello, $name!"\n',
    "/workspace/notes/todo.md": "- [ ] The greeting has a typo.\n",
}

CALLS: list[tuple[str, dict[str, object]]] = [
    ("glob", {"pattern": "**/*"}),
    ("read", {"path": "notes/todo.md"}),
    ("bash", {"command": "bash greet.sh"}),
    ("grep", {"pattern": "wrold", "include": "*.sh"}),
    # A model that has learnt another tool's names is told how to mend its call.
    ("edit", {"file_path": "greet.sh", "old_string": "wrold", "new_string": "world"}),
    ("edit", {"path": "greet.sh", "old_text": "wrold", "new_text": "world"}),
    ("bash", {"command": "bash greet.sh; bash greet.sh Ada"}),
    ("write", {"path": "notes/done.md", "content": "- [x] The greeting is mended.\n"}),
    ("bash", {"command": "seq 3000"}),
]


def show(text: str, lines: int = 6) -> None:
    """Print the first lines of what the model would get."""
    shown = text.split("\n")
    for line in shown[:lines]:
        print(f"    {line}")
    if len(shown) > lines:
        print(f"    ... {len(shown) - lines} more lines")


async def main() -> None:
    async with virtual(files=FILES, cwd="/workspace") as sandbox:
        tools = {tool.name: tool for tool in workspace_tools(sandbox)}
        for name, arguments in CALLS:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            print(f"{name}({given})")
            result = await tools[name].run(arguments)
            if result.is_error:
                print("    error:")
            show(result.text)


asyncio.run(main())
