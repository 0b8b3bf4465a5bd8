"""What lies beside an archive and says whose it is: a backup is there once this is.

By it a backup is known also where the record is another: after the loss of that, and to
other servers that keep their backups in the same bucket.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from smokebox.engine.names import check_id
from smokebox.engine.record.rows import BackupRow
from smokebox.errors import InvalidOption

LONGEST = 64 << 10
FORMAT = {"format": "tar+zstd", "version": 1}

ID = re.compile(r"b-[0-9a-f]{32}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "sandbox_id": (str,),
    "path": (str,),
    "name": (str, type(None)),
    "created_at": (float, int),
    "expires_at": (float, int, type(None)),
    "size": (int,),
    "bytes": (int,),
    "files": (int,),
    "disk": (int,),
    "checksum": (str,),
}


def encode(row: BackupRow) -> bytes:
    """The manifest of a backup."""
    told = asdict(row)
    return json.dumps({**FORMAT, **{name: told[name] for name in _KINDS}}, indent=2).encode()


def decode(data: bytes, id: str, place: str) -> BackupRow | None:
    """The row that a manifest is of; None for what is none, or of another backup."""
    try:
        told = json.loads(data)
        fields = {name: told[name] for name in _KINDS}
        if told["format"] != FORMAT["format"] or told["version"] != FORMAT["version"]:
            return None
        check_id(fields["sandbox_id"])
    except (ValueError, TypeError, KeyError, InvalidOption):
        return None
    if not all(type(fields[name]) in kinds for name, kinds in _KINDS.items()):
        return None
    row = BackupRow(**fields, status="ready", place=place)
    fits = row.id == id and row.path.startswith("/") and _CHECKSUM.fullmatch(row.checksum)
    return row if fits and min(row.size, row.bytes, row.files, row.disk) >= 0 else None
