"""Send a signed webhook for an issue, and get a label; with a fake GitHub on this machine."""

import hmac
import json
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from smokebox.testing import serve_project

SECRET, TOKEN = "webhook-secret", "ghp_example_4711"
requests: list[tuple[str, str, bool]] = []


class FakeGitHub(BaseHTTPRequestHandler):
    """Replacement for api.github.com in this example."""

    def do_GET(self) -> None:
        """Check the token, and return an issue."""
        valid = self.headers.get("authorization") == f"Bearer {TOKEN}"
        requests.append((self.command, self.path, valid))
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200 if valid else 401)
        self.end_headers()
        self.wfile.write(b'{"title": "It crashes", "body": "On a click."}')

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


github = ThreadingHTTPServer(("127.0.0.1", 0), FakeGitHub)
threading.Thread(target=github.serve_forever, daemon=True).start()
os.environ.update(GITHUB_WEBHOOK_SECRET=SECRET, GITHUB_TOKEN=TOKEN)
os.environ["GITHUB_URL"] = f"http://127.0.0.1:{github.server_port}"

with serve_project(Path(__file__).parent) as url:
    body = json.dumps({"action": "opened", "issue": {"number": 7, "title": "It crashes"}}).encode()
    signature = hmac.new(SECRET.encode(), body, "sha256").hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={signature}", "X-GitHub-Delivery": "one"}
    request = urllib.request.Request(f"{url}/agents/triage/shop-7?wait=result", body, headers)
    with urllib.request.urlopen(request) as response:
        print(json.load(response)["result"])
for method, path, valid in requests:
    print(method, path, "with the token" if valid else "without the token")
assert [method for method, _, valid in requests if valid] == ["GET", "POST"]
github.shutdown()
github.server_close()
