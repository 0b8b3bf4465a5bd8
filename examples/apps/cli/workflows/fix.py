"""Runs a coding CLI inside a sandbox: it finds its tools, its settings and a model, and no key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from smokebox import Egress, get_sandbox

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext
    from smokebox.egress import HandlerContext, Request, Response

# What `npm install -g` of a real one would leave behind: it asks its model, and does what it says.
CLI = """\
#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
body = json.dumps({"model": "m", "max_tokens": 100,
                   "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
request = urllib.request.Request(os.environ["CODER_URL"] + "/v1/messages", body, headers)
command = json.load(urllib.request.urlopen(request))["content"][0]["text"]
print("$", command, flush=True)
sys.exit(subprocess.call(command, shell=True))
"""


async def add_key(request: Request, env: Any, context: HandlerContext) -> Response:
    """The key of the models' server is added here, outside of the sandbox."""
    request.headers["x-api-key"] = env.CODER_KEY
    return await context.forward(request, to=os.environ["CODER_SERVER"])


async def run(ctx: WorkflowContext) -> dict[str, Any]:
    """`{"task": "...", "files": {...}}` becomes what the CLI said, and the files after it."""
    box = get_sandbox(
        ctx.env.CodingBox,
        f"fix-{ctx.id[:8]}",
        egress=Egress(outbound_by_host={"models.internal": add_key}),
    )
    try:
        await box.write_file("/usr/local/bin/coder", CLI)
        await box.exec("chmod +x /usr/local/bin/coder")
        for name, text in ctx.payload["files"].items():
            await box.write_file(name, text)
        done = await box.exec(["coder", ctx.payload["task"]], timeout=60)
        ctx.log.info("the CLI has ended", exit_code=done.exit_code)
        files = {name: await box.read_file(name) for name in ctx.payload["files"]}
        return {"said": done.stdout + done.stderr, "files": files}
    finally:
        await box.destroy()
