"""The fields of `Egress` are declared once: the docs and the HTTP API have the same."""

from __future__ import annotations

from pathlib import Path

import msgspec

from smokebox.egress.policy import Egress, egress_fields
from smokebox.server.routes.network import EgressBody

PAGE = Path(__file__).parents[2] / "docs" / "network.md"


def shown(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def test_docs_table_has_the_fields_with_their_defaults_and_help() -> None:
    rows = [
        f"| `{one.name}` | `{shown(getattr(Egress(), one.name))}` | {one.metadata['help']} |\n"
        for one in egress_fields()
    ]
    header = "| field | default | meaning |\n|---|---|---|\n"
    assert header + "".join(rows) + "\n" in PAGE.read_text()


def test_api_body_has_the_fields_with_their_defaults() -> None:
    assert [one.name for one in msgspec.structs.fields(EgressBody)] == [
        one.name for one in egress_fields()
    ]
    body = msgspec.convert({}, EgressBody)
    for one in egress_fields():
        assert shown(getattr(body, one.name)) == shown(getattr(Egress(), one.name))
