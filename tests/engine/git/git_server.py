"""A git server on a loopback port: `git http-backend`, with paths that misbehave."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator
    from pathlib import Path

USER, TOKEN = "reader", "s3cr3t-t0ken-w1th-åccent"
BASIC = base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
PIECE = 1 << 16


def git(*args: str, cwd: Path) -> str:
    """Run git and return its output."""
    settings = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "gc.auto=0")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": "@1700000000 +0000",
        "GIT_COMMITTER_DATE": "@1700000000 +0000",
    }
    command = ["git", *settings, *args]
    result = subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def make_repository(root: Path, name: str = "project.git") -> Path:
    """Create a bare repository with two commits on main, a branch, and two tags."""
    work = root / "work"
    work.mkdir(parents=True)
    git("init", "--quiet", "--initial-branch=main", cwd=work)
    for number in (1, 2):
        (work / "file.txt").write_text(f"{number}\n")
        git("add", "file.txt", cwd=work)
        git("commit", "--quiet", "-m", f"Commit {number}", cwd=work)
        git("tag", f"v{number}", cwd=work)
    git("branch", "feature/größe", "v1", cwd=work)
    git("clone", "--quiet", "--bare", str(work), str(root / name), cwd=root)
    return root / name


class GitServer:
    """Serves the repositories below `root` under `/plain/`, and misbehaves under other names.

    `seen` has each request with its headers. With `requires_token`, requests need credentials.
    `reached` is set when a stalled or truncated response has got as far as it will.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.origin = ""
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.reached = asyncio.Event()
        self.requires_token = False
        self._tasks: set[asyncio.Task[object]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        """Serve at `origin` during the block."""
        server = web.Server(self._respond, access_log=None, auto_decompress=False)
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(server, "127.0.0.1", 0, ssl=context)
        self.port = listening.sockets[0].getsockname()[1]
        self.origin = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        try:
            yield
        finally:
            listening.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await server.shutdown(0.1)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.seen.append((f"{request.method} {request.raw_path}", dict(request.headers)))
        _, behaviour, rest = request.raw_path.split("/", 2)
        if behaviour == "status":
            status, rest = rest.split("/", 1)
            return web.Response(status=int(status), text=f"no {request.headers!r}")
        if self.requires_token and request.headers.get("Authorization") != f"Basic {BASIC}":
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="git"'})
        if behaviour in ("moved", "far", "loop", "login", "local", "odd"):
            return web.Response(status=301, headers={"Location": self._location(behaviour, rest)})
        if behaviour == "stall":
            self.reached.set()
            await asyncio.Event().wait()
        if behaviour == "page":
            return web.Response(text="<html>log in</html>", content_type="text/html")
        return await self._backend(request, rest, cut=behaviour == "cut", slow=behaviour == "slow")

    def _location(self, behaviour: str, rest: str) -> str:
        return {
            "moved": f"/plain/{rest}",
            "far": f"http://localhost:{self.port}/plain/{rest}",
            "loop": f"/loop/{rest}",
            "login": "/page/login",
            "local": f"http://169.254.169.254/{rest}",
            "odd": "file:///etc/passwd",
        }[behaviour]

    async def _backend(
        self, request: web.BaseRequest, rest: str, *, cut: bool, slow: bool
    ) -> web.StreamResponse:
        path, _, query = rest.partition("?")
        if not (self.root / path.partition(".git")[0]).with_suffix(".git").is_dir():
            return web.Response(status=404)
        process = await asyncio.create_subprocess_exec(
            "git",
            "http-backend",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(self.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": f"/{path}",
                "QUERY_STRING": query,
                "REQUEST_METHOD": request.method,
                "CONTENT_TYPE": request.headers.get("Content-Type", ""),
                "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
                "HTTP_GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            },
        )
        try:
            return await self._relay(request, process, cut=cut, slow=slow)
        finally:
            # Its children hold the pipe too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            await process.stdout.read()
            await process.wait()

    async def _relay(
        self,
        request: web.BaseRequest,
        process: asyncio.subprocess.Process,
        *,
        cut: bool,
        slow: bool,
    ) -> web.StreamResponse:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(await request.content.read())
        process.stdin.close()
        response = web.StreamResponse()
        while line := (await process.stdout.readline()).decode().strip():
            name, _, value = line.partition(": ")
            response.headers[name] = value
        await response.prepare(request)
        written = 0
        while data := await process.stdout.read(PIECE):
            await response.write(data)
            written += len(data)
            if request.method == "POST" and written > PIECE and (cut or slow):
                self.reached.set()
                if slow:
                    await asyncio.Event().wait()
                assert request.transport is not None
                request.transport.abort()
                break
        return response
