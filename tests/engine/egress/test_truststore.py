"""Java's own kind of keystore, read by Java."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress.authority import Authority
from smokebox.engine.egress.trust import add_certificate, certificates

if TYPE_CHECKING:
    from pathlib import Path


def test_certificates_are_taken_from_pem_and_broken_ones_left_out() -> None:
    first, second = Authority.make("a"), Authority.make("b")
    text = first.pem + b"# comment\n" + second.pem
    text += b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"
    assert certificates(text) == [first.der, second.der]


@pytest.mark.skipif(not shutil.which("keytool"), reason="Java is not installed")
@pytest.mark.parametrize("before", ["jks", "other"])
def test_java_reads_what_was_written(before: str, tmp_path: Path) -> None:
    own, known = Authority.make("own"), Authority.make("known")
    keystore = b"\x30\x82 PKCS12 of any size"
    if before == "jks":
        keystore = add_certificate(b"", known.pem, b"")
    path = tmp_path / "cacerts"
    path.write_bytes(add_certificate(keystore, own.pem, known.pem))
    listed = subprocess.run(
        ["keytool", "-list", "-keystore", str(path), "-storepass", "changeit"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "contains 2 entries" in listed
