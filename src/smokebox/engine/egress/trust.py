"""Where programs of a sandbox look for whom to trust, and our authority put there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import PathNotFound

if TYPE_CHECKING:
    from smokebox.engine.files.rooted import Rooted

# Where Debian, Alpine and Arch have them all; made where there is none.
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
# From here `update-ca-certificates` takes it when it makes the bundle anew.
OWN = "/usr/local/share/ca-certificates/smokebox.crt"

# Where Red Hat, SUSE, Alpine and OpenSSL itself have them.
_OTHERS = (
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
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
    if _read(files, OWN) != pem:
        files.write(OWN, pem)
    found = {path: content for path in (BUNDLE, *_OTHERS) if (content := _read(files, path))}
    found.setdefault(BUNDLE, next(iter(found.values()), b""))
    for path, content in found.items():
        if pem not in content:
            files.write(path, content + (b"" if content.endswith(b"\n") else b"\n") + pem)


def _read(files: Rooted, path: str) -> bytes:
    try:
        return files.read(path, limit=_LARGEST)
    except PathNotFound:
        return b""
