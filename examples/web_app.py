"""A web app from a Dockerfile with several stages: tested, packed, and run on a slim base.

    python examples/web_app.py

The app is what a repository of yours would have: a package, its tests, and a Dockerfile. Stages
that need nothing of each other run at the same time, and the last one has the packed program alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from smokebox import connect

FILES = {
    "Dockerfile": """\
FROM python:3.12-slim AS source
WORKDIR /src
COPY notes ./notes

FROM source AS tested
COPY tests ./tests
RUN python3 -m unittest discover tests && touch /passed

FROM source AS packed
COPY pack.py .
RUN python3 pack.py notes && python3 -m zipapp . --main notes.server:main --output /notes.pyz

FROM python:3.12-slim
RUN useradd --system notes && install --directory --owner notes /var/lib/notes
# Nothing is copied unless the tests have passed.
COPY --from=tested /passed /usr/share/notes/passed
COPY --from=packed /notes.pyz /usr/share/notes/notes.pyz
USER notes
ENV PORT=8000
EXPOSE 8000
CMD ["python3", "/usr/share/notes/notes.pyz"]
""",
    ".dockerignore": "**/__pycache__\n",
    "notes/__init__.py": "",
    "notes/page.html": """\
<!doctype html>
<html>
  <head><title>Notes</title></head>
  <body>
    <h1>Notes</h1>
    <ul>{notes}</ul>
  </body>
</html>
""",
    "notes/app.py": '''\
"""The notes as a WSGI app: GET / is a page, POST / adds a note."""

import html
import importlib.resources
import sqlite3


class Notes:
    def __init__(self, path):
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT)")
        self.page = importlib.resources.files("notes").joinpath("page.html").read_text()

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "POST":
            text = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
            self.database.execute("INSERT INTO notes VALUES (?)", [text])
        rows = self.database.execute("SELECT text FROM notes ORDER BY rowid")
        notes = "".join(f"<li>{html.escape(text)}</li>" for [text] in rows)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [self.page.format(notes=notes).encode()]
''',
    "notes/server.py": """\
import os
from wsgiref.simple_server import make_server

from notes.app import Notes


def main():
    with make_server("", int(os.environ["PORT"]), Notes("/var/lib/notes/notes.db")) as server:
        server.serve_forever()
""",
    "tests/test_app.py": """\
import io
import unittest

from notes.app import Notes


class AppTest(unittest.TestCase):
    def request(self, app, method, body=b""):
        environ = {"REQUEST_METHOD": method, "CONTENT_LENGTH": len(body)}
        environ["wsgi.input"] = io.BytesIO(body)
        return b"".join(app(environ, lambda status, headers: None)).decode()

    def test_a_note_is_shown_as_text(self):
        app = Notes(":memory:")
        self.request(app, "POST", b"<b>milk</b>")
        self.assertIn("<li>&lt;b&gt;milk&lt;/b&gt;</li>", self.request(app, "GET"))
""",
    "pack.py": '''\
"""Compile a package in place, and take the indentation out of its pages."""

import compileall
import pathlib
import sys

package = pathlib.Path(sys.argv[1])
compileall.compile_dir(package, quiet=1, legacy=True)
for page in package.rglob("*.html"):
    page.write_text("".join(line.strip() for line in page.read_text().splitlines()))
for source in package.rglob("*.py"):
    source.unlink()
pathlib.Path(__file__).unlink()
''',
}
# Adds a note, or gets the page.
REQUEST = """\
import sys, urllib.request
body = sys.argv[1].encode() if len(sys.argv) > 1 else None
print(urllib.request.urlopen("http://127.0.0.1:8000", body).read().decode())
"""


def write_project(folder: Path) -> None:
    """Write the files of the app."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def main() -> None:
    """Build the image, start the app in a sandbox, and use it."""
    folder = Path("notes-app")
    write_project(folder)
    async with connect() as client:
        async for event in client.builds.stream(folder, names=["notes:1"]):
            if event.kind == "done":
                state = "cached" if event.cached else f"{event.seconds:.1f} s"
                print(f"[{event.step}/{event.steps}] {event.instruction.splitlines()[0]}: {state}")
        async with await client.create(image="notes:1", lifetime="10m") as sandbox:
            print((await sandbox.exec("id -un; ls /usr/share/notes")).stdout, end="")
            app = await sandbox.start_process("exec python3 /usr/share/notes/notes.pyz")
            await app.wait_for_port(8000)
            await sandbox.exec(["python3", "-c", REQUEST, "Buy <milk>"])
            print((await sandbox.exec(["python3", "-c", REQUEST])).stdout, end="")


if __name__ == "__main__":
    asyncio.run(main())
