"""Review a document with a workflow, as a client of the app."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    run = client.run("review", {"document": "# Plan\nWe will ship.\n"})
    print(run.wait().result["review"], end="")
