"""Two kinds of sandboxes by name, each with an image and egress handlers of its own.

The counterpart of an app with two containers in wrangler.jsonc; `smokebox import` converts one.
Images are built when they are first needed, or by `smokebox dev` as soon as their files change.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox import Sandbox, env, get_sandbox
from smokebox.egress import Response

if TYPE_CHECKING:
    from smokebox.egress import HandlerContext, Request

FILES = {
    "smokebox.toml": """\
[sandboxes.PyBox]
class_name = "PyBoxSandbox"
image = "./docker/python.Dockerfile"

[sandboxes.NodeBox]
image = "./docker/node.Dockerfile"
limits = "lite"
""",
    # FROM recipe:python, or a reference of a registry, where there is a network.
    "docker/python.Dockerfile": """\
FROM host
WORKDIR /workspace
COPY tables.py /opt/lib/
ENV PYTHONPATH=/opt/lib
""",
    "docker/tables.py": "def total(rows):\n    return sum(rows)\n",
    "docker/node.Dockerfile": """\
FROM host
ARG words="to be or not to be"
RUN echo "$words" | tr ' ' '\\n' | sort | uniq -c > /counts
""",
}


async def github(request: Request, env: Any, context: HandlerContext) -> Response:
    """Answer in place of the API; a real handler adds a token and forwards the request."""
    return Response(f"{request.method} {request.url}\n")


class PyBoxSandbox(Sandbox):
    """Sandboxes of the binding `PyBox`."""

    outbound_by_host = {"api.github.com": github}  # noqa: RUF012


def write_files() -> None:
    """Write the project."""
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


async def main() -> None:
    """Use a sandbox of each kind."""
    write_files()
    python = get_sandbox(env.PyBox, "user-42-python")
    node = get_sandbox(env.NodeBox, "user-42-node")
    try:
        result = await python.exec("python3 -c 'import tables; print(tables.total([2, 40]))'")
        print(result.stdout, end="")
        print((await python.exec("curl -sS https://api.github.com/user")).stdout, end="")
        print((await node.exec("cat /counts")).stdout, end="")
    finally:
        await python.destroy()
        await node.destroy()


if __name__ == "__main__":
    asyncio.run(main())
