"""Keys that S3 stores but that are not paths. SeaweedFS changes them, so a fake server is used."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from obstore.store import S3Store

from smokebox.errors import PathError
from smokebox.sandbox.filesystems.bucket import BucketFilesystem

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = sorted(["a//b", "/lead", "d/../e", "d/./f", "d/good", "d/sub/x", "ok", "a/fine", "//"])
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def listing(query: dict[str, list[str]]) -> str:
    prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
    encode = quote if "encoding-type" in query else str
    parts, seen = [], set()
    for key in KEYS:
        name, slash, _ = key[len(prefix) :].partition("/")
        if not key.startswith(prefix):
            continue
        if delimiter and slash:
            seen.add(f"{prefix}{name}/")
            continue
        parts.append(
            f"<Contents><Key>{encode(key)}</Key><LastModified>2026-01-02T03:04:05.000Z"
            f'</LastModified><ETag>"x"</ETag><Size>1</Size></Contents>'
        )
    parts += [f"<CommonPrefixes><Prefix>{encode(key)}</Prefix></CommonPrefixes>" for key in seen]
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="{NAMESPACE}"><Name>odd</Name>'
        f"<IsTruncated>false</IsTruncated>{''.join(parts)}</ListBucketResult>"
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            self._respond(200, listing(query).encode())
        else:
            self._object(unquote(url.path).removeprefix("/odd/"))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _object(self, key: str) -> None:
        self._respond(200 if key in KEYS else 404, b"x" if key in KEYS else b"")

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.send_header("ETag", '"x"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def fs() -> Iterator[BucketFilesystem]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store = S3Store(
        "odd",
        endpoint=f"http://127.0.0.1:{server.server_port}",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
    )
    yield BucketFilesystem(store)
    server.shutdown()
    server.server_close()


def test_invalid_keys_are_hidden_and_others_are_listed(fs: BucketFilesystem) -> None:
    fs.refresh()
    assert sorted(fs.listdir("/")) == ["a", "d", "ok"]
    assert sorted(fs.listdir("/a")) == ["fine"]
    assert {name: entry.kind for name, entry in fs.listdir("/d").items()} == {
        "good": "file",
        "sub": "directory",
    }


def test_files_beside_invalid_keys_are_readable(fs: BucketFilesystem) -> None:
    assert (fs.lstat("/a").kind, fs.lstat("/d/sub").kind) == ("directory", "directory")
    assert (fs.read("/a/fine"), fs.lstat("/d/good").size) == (b"x", 1)


def test_directory_with_invalid_keys_is_neither_removed_nor_moved(fs: BucketFilesystem) -> None:
    with pytest.raises(PathError, match="not valid paths"):
        fs.remove("/a", recursive=True)
    with pytest.raises(PathError, match="not valid paths"):
        fs.rename("/d", "/e")
