"""Has two agents work in sandboxes of two kinds."""

from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import served

with served(Path(__file__).parent) as url, AgentClient(url) as client:
    for name, said in client.run("compare").wait().result.items():
        print(name, said)
