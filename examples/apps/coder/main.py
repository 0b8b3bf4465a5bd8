"""Prompt an agent to write a page, and fetch it through its preview URL."""

import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from smokebox.sync import AgentClient, get_sandbox
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    reply = str(client.ask("coder", "hello-page", "Write a page that says hello."))
    print(reply)
    preview = urlsplit(reply.removeprefix("It is at "))
    # Browsers resolve all names below localhost to this machine; urllib needs the address.
    request = urllib.request.Request(
        f"http://127.0.0.1:{preview.port}/?{preview.query}", headers={"host": preview.netloc}
    )
    with urllib.request.urlopen(request) as page:
        print(page.read().decode(), end="")
get_sandbox("hello-page").destroy()
