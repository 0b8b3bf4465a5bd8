"""Fields of `Egress`: the table in the docs and the HTTP API match them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from smokebox.egress.policy import Egress, egress_fields
from smokebox.server.routes.network import EgressBody

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "network.md"


def literal(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def test_docs_table_has_the_fields_with_their_defaults_and_help() -> None:
    rows = [
        f"| `{field.name}` | `{literal(getattr(Egress(), field.name))}`"
        f" | {field.metadata['help']} |\n"
        for field in egress_fields()
    ]
    header = "| field | default | meaning |\n|---|---|---|\n"
    assert header + "".join(rows) + "\n" in DOCS_PAGE.read_text()


def test_api_body_has_the_fields_with_their_defaults() -> None:
    assert [field.name for field in msgspec.structs.fields(EgressBody)] == [
        field.name for field in egress_fields()
    ]
    body = msgspec.convert({}, EgressBody)
    for field in egress_fields():
        assert literal(getattr(body, field.name)) == literal(getattr(Egress(), field.name))
