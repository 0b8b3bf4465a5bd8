"""Print the schedule of the report, and run it now."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    for workflow in client.index().workflows:
        print(workflow.name, workflow.schedule)
    print(client.run("report").wait().result, end="")
