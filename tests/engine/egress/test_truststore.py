"""Java keystores with the authority, read by keytool."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress.authority import Authority
from smokebox.engine.egress.trust import add_certificate, certificates

if TYPE_CHECKING:
    from pathlib import Path


def test_invalid_certificates_of_a_pem_file_are_skipped() -> None:
    first, second = Authority.make("a"), Authority.make("b")
    text = first.pem + b"# comment\n" + second.pem
    text += b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"
    assert certificates(text) == [first.der, second.der]


@pytest.mark.skipif(not shutil.which("keytool"), reason="Java is not installed")
@pytest.mark.parametrize("original", ["jks", "other"])
def test_keytool_reads_the_keystore(original: str, tmp_path: Path) -> None:
    added, existing = Authority.make("added"), Authority.make("existing")
    keystore = b"\x30\x82 PKCS12 of any size"
    if original == "jks":
        keystore = add_certificate(b"", existing.pem, b"")
    path = tmp_path / "cacerts"
    path.write_bytes(add_certificate(keystore, added.pem, existing.pem))
    listing = subprocess.run(
        ["keytool", "-list", "-keystore", str(path), "-storepass", "changeit"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "contains 2 entries" in listing
