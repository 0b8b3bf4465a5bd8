"""Manifests of archives, which may be damaged or written by others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smokebox.engine.backups.archive_store import decode_manifest, encode_manifest
from smokebox.engine.record.rows import BackupRow

ROW = BackupRow(
    id="b-" + "0" * 32,
    sandbox_id="box",
    path="/workspace",
    name=None,
    status="ready",
    place="s3://bucket",
    created_at=1.5,
    expires_at=None,
    size=1,
    bytes=2,
    files=3,
    disk=4,
    checksum="a" * 64,
)
MANIFEST = json.loads(encode_manifest(ROW))


def decode(manifest: dict[str, Any]) -> BackupRow | None:
    return decode_manifest(json.dumps(manifest).encode(), ROW.id, ROW.place)


def test_manifest_round_trip() -> None:
    assert decode(MANIFEST) == ROW
    assert decode({**MANIFEST, "added": "by a later version"}) == ROW


@pytest.mark.parametrize("name", MANIFEST)
def test_every_field_is_required(name: str) -> None:
    assert decode({key: value for key, value in MANIFEST.items() if key != name}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("id", "b-" + "1" * 32),
        ("sandbox_id", "../box"),
        ("path", "workspace"),
        ("name", 3),
        ("created_at", "now"),
        ("size", "1"),
        ("size", 1.5),
        ("files", True),
        ("disk", -1),
        ("checksum", "A" * 64),
    ],
)
def test_invalid_values_are_refused(name: str, value: object) -> None:
    assert decode({**MANIFEST, name: value}) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff"])
def test_other_data_is_refused(data: bytes) -> None:
    assert decode_manifest(data, ROW.id, ROW.place) is None
