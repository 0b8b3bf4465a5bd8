"""Has two agents work in sandboxes of two kinds."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    for name, said in client.run("compare").wait().result.items():
        print(name, said)
