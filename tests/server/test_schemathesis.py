"""Requests that nobody thought of, made from the OpenAPI document, to a server that runs.

Each answer must be one that the document has, and none a defect. What is made is the same in
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
# The document as programs read it.
DOCUMENT = msgspec.json.decode(msgspec.json.encode(make_document(all_endpoints(), all_sockets())))
TAGS = [tag["name"] for tag in DOCUMENT["tags"]]
LEFT_OUT = {"system_shutdown": "ends the server; test_drain has it"}
# Streams that do not end by themselves: of these only the beginning of the answer is seen.
ENDLESS = {"network_follow_log", "watches_watch"}
# What is there, so that most requests get past 404.
THERE = {"id": "box", "process": "p", "session": "s", "terminal": "t", "context": "c"}
FILE = "/workspace/there"
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# `make soak` takes the time for more.
MORE = 4 if "SMOKEBOX_SOAK" in os.environ else 1
EXAMPLES = {POSITIVE: 8 * MORE, NEGATIVE: 5 * MORE}
CHECKED = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@schemathesis.serializer("application/x-tar")
def _as_they_are(_: object, value: bytes) -> bytes:
    return value


@contextlib.contextmanager
def served(home: Path) -> Iterator[str]:
    command = [sys.executable, "-c", PROGRAM, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            yield url
        finally:
            # A signal alone would leave the sandboxes to the next server.
            requests.post(f"{url}/api/shutdown", json={"sandboxes": "sleep"}, timeout=30)
            process.terminate()


def furnish(url: str) -> None:
    """Have a sandbox afresh, with one of each thing in it."""
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
        answer = requests.request(method, path, json=body, timeout=30)
        assert answer.ok, answer.text


def tame(case: Any, mode: GenerationMode) -> None:
    """Point a request to what is there, and have it end soon."""
    raw = case.operation.definition.raw
    name = raw["operationId"]
    rest = [one for one in raw["parameters"] if one["in"] != "path"] or "requestBody" in raw
    for part in case.path_parameters or {}:
        if part in THERE and (rest or mode is POSITIVE) and name != "sandboxes_destroy":
            case.path_parameters[part] = THERE[part]
    for fields in (case.query, case.body):
        for field in ("path", "source"):
            # Every other one: the rest is for paths that nobody thought of.
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


def answer_to(case: Any, url: str) -> schemathesis.Response:
    if case.operation.definition.raw["operationId"] not in ENDLESS:
        answer: schemathesis.Response = case.call(base_url=url, timeout=30)
        return answer
    asked = case.as_transport_kwargs(base_url=url)
    with requests.Session() as session, session.request(**asked, stream=True, timeout=30) as got:
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
    """How an operation can be asked: one that takes nothing cannot be asked wrongly."""
    raw = operation.definition.raw
    return list(EXAMPLES) if raw["parameters"] or "requestBody" in raw else [POSITIVE]


def attack(operation: Any, url: str, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        tame(case, mode)
        answer = answer_to(case, url)
        assert answer.status_code != 500, f"{case.as_curl_command()}\n{answer.text}"
        case.validate_response(answer, checks=CHECKED)

    ask()


@pytest.mark.parametrize("tag", TAGS)
def test_no_request_finds_a_defect_or_an_undocumented_answer(tag: str, tmp_path: Path) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    operations = [
        one
        for one in found
        if one.definition.raw["tags"] == [tag] and one.definition.raw["operationId"] not in LEFT_OUT
    ]
    with served(tmp_path / "home") as url:
        for operation in operations:
            for mode in modes(operation):
                furnish(url)
                attack(operation, url, mode)


def test_what_is_left_out_is_there() -> None:
    assert LEFT_OUT.keys() | ENDLESS <= {one.name for one in all_endpoints()}
