"""Where programs of a sandbox look for whom to trust, and our authority put there."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from typing import TYPE_CHECKING

from smokebox.errors import AccessDenied, PathError, PathNotDirectory, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted import Rooted


# Where Debian, Alpine and Arch have them all; made where there is none.
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
OWN = "/etc/ssl/certs/smokebox.crt"

# From here `update-ca-certificates` takes it when it makes the bundle anew.
_FOR_UPDATES = "/usr/local/share/ca-certificates/smokebox.crt"

# Where Red Hat, SUSE, Alpine and OpenSSL itself have them.
_OTHERS = (
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_OF_JAVA = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
)
# Where a Java has its own, below a directory for each of them.
_JAVAS, _IN_JAVA = ("/usr/lib/jvm", "/opt/java"), ("lib/security", "jre/lib/security")
_LARGEST = 8 << 20

VARIABLES = {
    **dict.fromkeys(
        (
            "SSL_CERT_FILE",
            "CURL_CA_BUNDLE",
            "REQUESTS_CA_BUNDLE",
            "GIT_SSL_CAINFO",
            "PIP_CERT",
            "AWS_CA_BUNDLE",
            "CARGO_HTTP_CAINFO",
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
            "NIX_SSL_CERT_FILE",
        ),
        BUNDLE,
    ),
    # These two take ours besides their own.
    "NODE_EXTRA_CA_CERTS": OWN,
    "DENO_CERT": OWN,
}
"""What programs of a sandbox with a network have in their environment."""


def install(files: Rooted, pem: bytes) -> None:
    """Have the programs of a sandbox trust an authority. Safe to repeat."""
    for path in (OWN, _FOR_UPDATES):
        if _read(files, path) != pem:
            _write(files, path, pem)
    found = {path: content for path in (BUNDLE, *_OTHERS) if (content := _read(files, path))}
    bundle = next(iter(found.values()), b"")
    for path, content in {BUNDLE: bundle, **found}.items():
        if pem not in content:
            _write(files, path, content + (b"" if content.endswith(b"\n") else b"\n") + pem)
    [own] = certificates(pem)
    for path in _of_java(files):
        content = _read(files, path)
        if content and own not in content:
            _write(files, path, add_certificate(content, pem, bundle))


def _of_java(files: Rooted) -> Iterator[str]:
    yield from _OF_JAVA
    for folder in _JAVAS:
        try:
            names = files.names(folder)
        except PathError:
            continue
        yield from (f"{folder}/{name}/{place}/cacerts" for name in names for place in _IN_JAVA)


def _write(files: Rooted, path: str, content: bytes) -> None:
    try:
        files.write(path, content)
    except AccessDenied:
        # By an ordinary user's engine, root inside may not change what is root's outside, such
        # as the host's /usr. What the variables name is not there.
        if path in (OWN, BUNDLE):
            raise


def _read(files: Rooted, path: str) -> bytes:
    try:
        return files.read(path, limit=_LARGEST)
    except (PathNotFound, PathNotDirectory):
        return b""


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
