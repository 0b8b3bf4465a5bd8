"""Fix a file with a coding CLI, with a scripted model server."""

import os
from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import FakeModelServer, serve_project

with FakeModelServer("sed -i 's/pritn/print/' hello.py && python3 hello.py") as models:
    os.environ.update(CODER_SERVER=models.url, CODER_KEY=models.api_key)
    with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
        payload = {"task": "hello.py does not run.", "files": {"hello.py": "pritn('hello')\n"}}
        result = client.run("fix", payload).wait().result
    print(result["output"], end="")
    assert result["files"]["hello.py"] == "print('hello')\n"
