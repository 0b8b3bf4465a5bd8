"""Run a coding CLI in a sandbox that has its settings and a model, but no API key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from smokebox import Egress, get_sandbox

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext
    from smokebox.egress import HandlerContext, Request, Response

# Stands for a real CLI: it prompts its model, and runs the command that the model replies with.
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
    """Add the key of the model server, outside the sandbox."""
    request.headers["x-api-key"] = env.CODER_KEY
    return await context.forward(request, to=os.environ["CODER_SERVER"])


async def run(ctx: WorkflowContext) -> dict[str, Any]:
    """Take `{"task": "...", "files": {...}}`; return the output of the CLI and the new files."""
    sandbox = get_sandbox(
        ctx.env.CodingBox,
        f"fix-{ctx.id[:8]}",
        egress=Egress(outbound_by_host={"models.internal": add_key}),
    )
    try:
        await sandbox.write_file("/usr/local/bin/coder", CLI)
        await sandbox.exec("chmod +x /usr/local/bin/coder")
        for name, text in ctx.payload["files"].items():
            await sandbox.write_file(name, text)
        done = await sandbox.exec(["coder", ctx.payload["task"]], timeout=60)
        ctx.log.info("the CLI exited", exit_code=done.exit_code)
        files = {name: await sandbox.read_file(name) for name in ctx.payload["files"]}
        return {"output": done.stdout + done.stderr, "files": files}
    finally:
        await sandbox.destroy()
