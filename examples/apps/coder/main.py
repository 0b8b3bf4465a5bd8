"""Has a page written, and looks at it through its preview."""

import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from smokebox.sync import AgentClient, get_sandbox
from smokebox.testing import serve_project

with serve_project(Path(__file__).parent) as url, AgentClient(url) as client:
    answer = str(client.ask("coder", "hello-page", "Write a page that says hello."))
    print(answer)
    place = urlsplit(answer.removeprefix("It is at "))
    # A browser knows that all names below localhost are this machine.
    request = urllib.request.Request(
        f"http://127.0.0.1:{place.port}/", headers={"host": place.netloc}
    )
    with urllib.request.urlopen(request) as page:
        print(page.read().decode(), end="")
get_sandbox("hello-page").destroy()
