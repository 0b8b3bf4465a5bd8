"""Run two agents in sandboxes of two kinds."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    for name, reply in client.run("compare").wait().result.items():
        print(name, reply)
