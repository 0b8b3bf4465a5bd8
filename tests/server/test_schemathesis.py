"""Requests generated from the OpenAPI document, sent to a running server.

Every response must be documented, and none may be an internal error. The requests are the same in
every run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from smokebox.server.openapi import make_document
from smokebox.server.routes import all_endpoints, all_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import asyncio, sys
from smokebox.server.server import serve
from smokebox.server.settings import ServerSettings

async def ready(server):
    print(server.url, flush=True)

settings = ServerSettings(home=sys.argv[1], host="127.0.0.1", pool=0, drain_seconds=0.1)
asyncio.run(serve(settings, ready))
"""
# As decoded from JSON.
DOCUMENT = msgspec.json.decode(msgspec.json.encode(make_document(all_endpoints(), all_sockets())))
TAGS = [tag["name"] for tag in DOCUMENT["tags"]]
EXCLUDED = {"system_shutdown": "stops the server; see test_drain"}
# Streams that do not end by themselves: only the head of their response is checked.
ENDLESS = {"network_follow_log", "watches_watch"}
# Existing objects, so that most requests get past 404.
EXISTING = {"id": "box", "process": "p", "session": "s", "terminal": "t", "context": "c"}
FILE = "/workspace/file"
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# `make soak` runs more examples.
FACTOR = 4 if "SMOKEBOX_SOAK" in os.environ else 1
EXAMPLES = {POSITIVE: 8 * FACTOR, NEGATIVE: 5 * FACTOR}
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@schemathesis.serializer("application/x-tar")
def _serialize_tar(_: object, value: bytes) -> bytes:
    return value


@contextlib.contextmanager
def run_server_process(home: Path) -> Iterator[str]:
    command = [sys.executable, "-c", PROGRAM, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            yield url
        finally:
            # After a signal alone, sandboxes keep running for the next server.
            requests.post(f"{url}/api/shutdown", json={"sandboxes": "sleep"}, timeout=30)
            process.terminate()


def create_objects(url: str) -> None:
    """Create the sandbox again, with one object of each kind."""
    box = f"{url}/api/sandboxes/box"
    process: dict[str, Any] = {"command": "cat", "id": "p", "stdin": True}
    for method, path, body in (
        ("DELETE", box, None),
        ("PUT", box, {}),
        ("PUT", f"{box}/files?path={FILE}", None),
        ("POST", f"{box}/processes", process),
        ("POST", f"{box}/sessions", {"id": "s"}),
        ("POST", f"{box}/terminals", {"id": "t"}),
        ("POST", f"{box}/code/contexts", {"id": "c"}),
    ):
        response = requests.request(method, path, json=body, timeout=30)
        assert response.ok, response.text


def adjust(case: Any, mode: GenerationMode) -> None:
    """Direct a request to existing objects, with a short timeout."""
    raw = case.operation.definition.raw
    name = raw["operationId"]
    has_options = "requestBody" in raw or any(
        parameter["in"] != "path" for parameter in raw["parameters"]
    )
    for part in case.path_parameters or {}:
        if part in EXISTING and (has_options or mode is POSITIVE) and name != "sandboxes_destroy":
            case.path_parameters[part] = EXISTING[part]
    for fields in (case.query, case.body):
        for field in ("path", "source"):
            # Only about half of them: the others keep their generated paths.
            if isinstance(fields, dict) and _is_even(fields.get(field)):
                fields[field] = FILE
    if name == "processes_stream_logs":
        case.query = {**(case.query or {}), "follow": False}
    if name == "processes_wait":
        case.query = {**(case.query or {}), "timeout": 0.1}
    if (
        isinstance(case.body, dict)
        and _has_timeout(case)
        and isinstance(case.body.get("timeout"), (int, float, type(None)))
    ):
        case.body["timeout"] = 0.2


def _is_even(path: object) -> bool:
    return isinstance(path, str) and len(path) % 2 == 0


def _has_timeout(case: Any) -> bool:
    content = case.operation.definition.raw["requestBody"]["content"]
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = DOCUMENT["components"]["schemas"].get(reference.rpartition("/")[2], {})
    return "timeout" in schema.get("properties", {})


def send(case: Any, url: str) -> schemathesis.Response:
    if case.operation.definition.raw["operationId"] not in ENDLESS:
        response: schemathesis.Response = case.call(base_url=url, timeout=30)
        return response
    options = case.as_transport_kwargs(base_url=url)
    with requests.Session() as session, session.request(**options, stream=True, timeout=30) as got:
        return schemathesis.Response(
            status_code=got.status_code,
            headers={name.lower(): [value] for name, value in got.headers.items()},
            content=b"" if got.ok else got.content,
            request=got.request,
            elapsed=got.elapsed.total_seconds(),
            verify=False,
            stream_cut_short=got.ok,
        )


def modes(operation: Any) -> list[GenerationMode]:
    """Return the modes of an operation. One without parameters has no invalid requests."""
    raw = operation.definition.raw
    return list(EXAMPLES) if raw["parameters"] or "requestBody" in raw else [POSITIVE]


def fuzz(operation: Any, url: str, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        adjust(case, mode)
        response = send(case, url)
        assert response.status_code != 500, f"{case.as_curl_command()}\n{response.text}"
        case.validate_response(response, checks=CHECKS)

    check()


@pytest.mark.parametrize("tag", TAGS)
def test_generated_requests_get_documented_responses(tag: str, tmp_path: Path) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    operations = [
        operation
        for operation in found
        if operation.definition.raw["tags"] == [tag]
        and operation.definition.raw["operationId"] not in EXCLUDED
    ]
    with run_server_process(tmp_path / "home") as url:
        for operation in operations:
            for mode in modes(operation):
                create_objects(url)
                fuzz(operation, url, mode)


def test_excluded_operations_exist() -> None:
    assert EXCLUDED.keys() | ENDLESS <= {endpoint.name for endpoint in all_endpoints()}
