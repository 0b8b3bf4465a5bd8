"""Whom Java trusts: a keystore of its own kind, read and written without Java."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct

_MAGIC, _VERSION, _TRUSTED = 0xFEEDFEED, 2, 2
_HEADER = struct.Struct("!III")
_DIGEST = 20
# What every such keystore has; it is no secret, and keeps no one out.
_PASSWORD = "changeit".encode("utf-16-be") + b"Mighty Aphrodite"
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_ALIAS = "smokebox"


def add_certificate(keystore: bytes, pem: bytes, bundle: bytes) -> bytes:
    """A keystore with one certificate more.

    Where it is not of Java's old kind, which every Java reads, it is made anew, with all
    certificates of `bundle`.
    """
    [own] = certificates(pem)
    if len(keystore) > _HEADER.size + _DIGEST:
        magic, version, count = _HEADER.unpack_from(keystore)
        if (magic, version) == (_MAGIC, _VERSION):
            return _sealed(count + 1, keystore[_HEADER.size : -_DIGEST] + _entry(_ALIAS, own))
    found = [own, *(one for one in certificates(bundle) if one != own)]
    entries = [_entry(f"{_ALIAS}-{number}", one) for number, one in enumerate(found)]
    return _sealed(len(entries), b"".join(entries))


def certificates(pem: bytes) -> list[bytes]:
    """The certificates of a file in PEM, as Java wants them; broken ones are left out."""
    found = []
    for text in _PEM.findall(pem):
        try:
            found.append(base64.b64decode(b"".join(text.split()), validate=True))
        except binascii.Error:
            continue
    return found


def _entry(alias: str, certificate: bytes) -> bytes:
    return (
        struct.pack("!I", _TRUSTED)
        + _text(alias)
        + struct.pack("!Q", 0)
        + _text("X.509")
        + struct.pack("!I", len(certificate))
        + certificate
    )


def _sealed(count: int, entries: bytes) -> bytes:
    body = _HEADER.pack(_MAGIC, _VERSION, count) + entries
    # Java's own, against accidents.
    digest = hashlib.sha1(_PASSWORD + body, usedforsecurity=False).digest()
    return body + digest


def _text(text: str) -> bytes:
    return struct.pack("!H", len(text)) + text.encode()
