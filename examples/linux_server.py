"""A web server in a Linux sandbox, a shell session, and files that survive sleep."""

import asyncio
import tempfile

from smokebox.engine import Host

APP = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Counter(BaseHTTPRequestHandler):
    seen = 0

    def do_GET(self):
        Counter.seen += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"visit {Counter.seen}\\n".encode())

HTTPServer(("127.0.0.1", 8000), Counter).serve_forever()
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        async with await Host.open(home) as host:
            sandbox = host.sandbox("web", limits={"memory": "256MiB", "pids": 64})
            await sandbox.write_file("app.py", APP)
            server = await sandbox.start_process(["python3", "-u", "app.py"])
            await server.wait_for_port(8000, timeout=20)
            response = await sandbox.exec("curl -s localhost:8000")
            print("response:", response.stdout.strip())

            session = await sandbox.create_session()
            await sandbox.exec("cd /tmp && name=smokebox", session=session)
            print(
                "session state:",
                (await sandbox.exec("echo $name in $PWD", session=session)).stdout.strip(),
            )

            await sandbox.sleep()
            print("process after sleep:", server.status)
            print("file after wake:", await sandbox.exists("app.py"))
            await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
