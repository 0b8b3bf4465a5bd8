"""GitHub sends an issue, and gets a label. A stand-in for GitHub listens on this machine."""

import hmac
import json
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from smokebox.testing import serve_project

SECRET, TOKEN = "of-the-webhook", "ghp_of_the_example_4711"
asked: list[tuple[str, str, bool]] = []


class StandIn(BaseHTTPRequestHandler):
    """What api.github.com is in this example."""

    def do_GET(self) -> None:
        """Tell of an issue, to who has the token."""
        known = self.headers.get("authorization") == f"Bearer {TOKEN}"
        asked.append((self.command, self.path, known))
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b'{"title": "It crashes", "body": "On a click."}')

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


github = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
threading.Thread(target=github.serve_forever, daemon=True).start()
os.environ.update(GITHUB_WEBHOOK_SECRET=SECRET, GITHUB_TOKEN=TOKEN)
os.environ["GITHUB_STAND_IN"] = f"http://127.0.0.1:{github.server_port}"

with serve_project(Path(__file__).parent) as url:
    body = json.dumps({"action": "opened", "issue": {"number": 7, "title": "It crashes"}}).encode()
    signature = hmac.new(SECRET.encode(), body, "sha256").hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={signature}", "X-GitHub-Delivery": "one"}
    request = urllib.request.Request(f"{url}/agents/triage/shop-7?wait=result", body, headers)
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["result"])
for method, path, known in asked:
    print(method, path, "with the token" if known else "without the token")
assert [method for method, _, known in asked if known] == ["GET", "POST"]
github.shutdown()
github.server_close()
