"""Tool calls without a model: find a bug, fix it and run the program."""

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
    # Wrong argument names give an error that tells the model how to fix the call.
    ("edit", {"file_path": "greet.sh", "old_string": "wrold", "new_string": "world"}),
    ("edit", {"path": "greet.sh", "old_text": "wrold", "new_text": "world"}),
    ("bash", {"command": "bash greet.sh; bash greet.sh Ada"}),
    ("write", {"path": "notes/done.md", "content": "- [x] The greeting is fixed.\n"}),
    ("bash", {"command": "seq 3000"}),
]


def show(text: str, lines: int = 6) -> None:
    """Print the first lines of the result that the model gets."""
    result = text.split("\n")
    for line in result[:lines]:
        print(f"    {line}")
    if len(result) > lines:
        print(f"    ... {len(result) - lines} more lines")


async def main() -> None:
    async with virtual(files=FILES, cwd="/workspace") as sandbox:
        tools = {tool.name: tool for tool in workspace_tools(sandbox)}
        for name, arguments in CALLS:
            formatted = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            print(f"{name}({formatted})")
            result = await tools[name].run(arguments)
            if result.is_error:
                print("    error:")
            show(result.text)


asyncio.run(main())
