"""Installs the authority of a sandbox where its programs look for trusted certificates."""

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

    from smokebox.engine.files.rooted_files import RootedFiles


# Bundle of Debian, Alpine and Arch; created if the image has none.
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
OWN = "/etc/ssl/certs/smokebox.crt"

# `update-ca-certificates` reads this when it writes the bundle again.
FOR_UPDATES = "/usr/local/share/ca-certificates/smokebox.crt"

# Bundles of Red Hat, SUSE, Alpine and OpenSSL itself.
BUNDLES = (
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
KEYSTORES = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
)
# Directories of Java installations, and the places of a keystore in one.
_JAVA_HOMES, _KEYSTORE_FOLDERS = ("/usr/lib/jvm", "/opt/java"), ("lib/security", "jre/lib/security")
_MAX_FILE = 8 << 20

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
    # These two are used in addition to the program's own certificates.
    "NODE_EXTRA_CA_CERTS": OWN,
    "DENO_CERT": OWN,
}
"""Environment variables of programs in a sandbox with a network."""


def install(files: RootedFiles, pem: bytes) -> None:
    """Make the programs of a sandbox trust an authority. Safe to repeat."""
    for path in (OWN, FOR_UPDATES):
        if _read(files, path) != pem:
            _write(files, path, pem)
    found = {path: content for path in (BUNDLE, *BUNDLES) if (content := _read(files, path))}
    bundle = next(iter(found.values()), b"")
    for path, content in {BUNDLE: bundle, **found}.items():
        if pem not in content:
            _write(files, path, content + (b"" if content.endswith(b"\n") else b"\n") + pem)
    [own] = certificates(pem)
    for path in _keystores(files):
        content = _read(files, path)
        if content and own not in content:
            _write(files, path, add_certificate(content, pem, bundle))


def _keystores(files: RootedFiles) -> Iterator[str]:
    yield from KEYSTORES
    for folder in _JAVA_HOMES:
        try:
            names = files.names(folder)
        except PathError:
            continue
        yield from (
            f"{folder}/{name}/{place}/cacerts" for name in names for place in _KEYSTORE_FOLDERS
        )


def _write(files: RootedFiles, path: str, content: bytes) -> None:
    try:
        files.write(path, content)
    except AccessDenied:
        # In an engine without root, root of the sandbox cannot change files of the host's root,
        # such as those in /usr. The files that the variables name are not among them.
        if path in (OWN, BUNDLE):
            raise


def _read(files: RootedFiles, path: str) -> bytes:
    try:
        return files.read(path, limit=_MAX_FILE)
    except (PathNotFound, PathNotDirectory):
        return b""


_MAGIC, _VERSION, _TRUSTED = 0xFEEDFEED, 2, 2
_HEADER = struct.Struct("!III")
_DIGEST = 20
# Every keystore of this format has this password, so it is not a secret.
_PASSWORD = "changeit".encode("utf-16-be") + b"Mighty Aphrodite"
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_ALIAS = "smokebox"


def add_certificate(keystore: bytes, pem: bytes, bundle: bytes) -> bytes:
    """Return a keystore with another certificate.

    A keystore that is not JKS, which every Java can read, is replaced by one with all
    certificates of `bundle`.
    """
    [own] = certificates(pem)
    if len(keystore) > _HEADER.size + _DIGEST:
        magic, version, count = _HEADER.unpack_from(keystore)
        if (magic, version) == (_MAGIC, _VERSION):
            return _with_digest(count + 1, keystore[_HEADER.size : -_DIGEST] + _entry(_ALIAS, own))
    found = [own, *(one for one in certificates(bundle) if one != own)]
    entries = [_entry(f"{_ALIAS}-{number}", one) for number, one in enumerate(found)]
    return _with_digest(len(entries), b"".join(entries))


def certificates(pem: bytes) -> list[bytes]:
    """Return the valid certificates of a PEM file, as DER."""
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


def _with_digest(count: int, entries: bytes) -> bytes:
    body = _HEADER.pack(_MAGIC, _VERSION, count) + entries
    # Java checks it for corruption.
    digest = hashlib.sha1(_PASSWORD + body, usedforsecurity=False).digest()
    return body + digest


def _text(text: str) -> bytes:
    return struct.pack("!H", len(text)) + text.encode()
