"""Private servers that need a token: a Git server, a Python index and an npm registry."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from pathlib import Path

GIT, PYTHON, NPM, ECHO = "git.test", "index.test", "npm.test", "echo.test"
WHEEL = "tiny-1.0-py3-none-any.whl"


class Registries:
    """Serves all of them, by Host, and responds 401 without the token.

    `seen` has the host and path of each request.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.seen: list[str] = []
        self._token = token
        self._repository = _repository(folder)
        self._wheel = _wheel()
        self._package = _package()

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Respond to one request."""
        self.seen.append(f"{request.host}{request.path}")
        if not self._is_authorized(request.headers.get("authorization", "")):
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        match request.host:
            case "git.test":
                return await self._git(request)
            case "index.test":
                return self._python(request)
            case "npm.test":
                return self._npm(request)
        return web.json_response(dict(request.headers), headers={"X-Seen": str(request.headers)})

    def _is_authorized(self, authorization: str) -> bool:
        basic = base64.b64encode(f"x:{self._token}".encode()).decode()
        return authorization in (f"Bearer {self._token}", f"Basic {basic}")

    async def _git(self, request: web.Request) -> web.Response:
        advertise = request.path.endswith("/info/refs")
        command = ["git", "upload-pack", "--stateless-rpc"]
        command += ["--advertise-refs"] if advertise else []
        process = await asyncio.create_subprocess_exec(
            *command, str(self._repository), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        body = await request.read()
        out, _ = await process.communicate(body)
        kind = "advertisement" if advertise else "result"
        if advertise:
            out = b"001e# service=git-upload-pack\n0000" + out
        return web.Response(body=out, content_type=f"application/x-git-upload-pack-{kind}")

    def _python(self, request: web.Request) -> web.Response:
        if request.path.endswith(WHEEL):
            return web.Response(body=self._wheel)
        if request.path.rstrip("/").endswith("tiny"):
            link = f'<a href="/files/{WHEEL}">{WHEEL}</a>'
            return web.Response(text=link, content_type="text/html")
        return web.Response(status=404)

    def _npm(self, request: web.Request) -> web.Response:
        if request.path.endswith(".tgz"):
            return web.Response(body=self._package)
        if request.path != "/tiny":
            return web.json_response({})
        digest = base64.b64encode(hashlib.sha512(self._package).digest()).decode()
        dist = {"tarball": f"https://{NPM}/tiny/-/tiny-1.0.0.tgz", "integrity": f"sha512-{digest}"}
        version = {"name": "tiny", "version": "1.0.0", "dist": dist}
        return web.json_response(
            {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        )


def _repository(folder: Path) -> Path:
    bare = folder / "tiny.git"
    work = folder / "tiny"
    work.mkdir()
    (work / "README").write_text("a tiny repository\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x.test", "-C", str(work)]
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    return bare


def _wheel() -> bytes:
    files = {
        "tiny.py": "WORD = 'a tiny module'\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    files["tiny-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _package() -> bytes:
    files = {
        "package/package.json": json.dumps({"name": "tiny", "version": "1.0.0"}),
        "package/index.js": "module.exports = 'a tiny package';\n",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()
