"""A certificate authority for the servers of the tests, which the proxy trusts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def authority_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of an authority for all tests: loading another takes long."""
    file = tmp_path_factory.mktemp("authority") / "authority.pem"
    Authority.open(str(file), "tests")
    return file


@pytest.fixture
def authority(authority_file: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Return an authority that the proxy trusts when it connects to servers."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority_file))
    return Authority.open(str(authority_file), "tests")
