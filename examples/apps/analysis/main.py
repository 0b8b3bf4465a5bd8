"""Ask a question about a table, and get a typed result."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

TABLE = "city,amount\nLisbon,40\nOslo,120\nLisbon,310\nQuito,40\n"

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    run = client.run("analyse", {"table": TABLE, "question": "Which city spends most?"})
    print(run.wait().result)
