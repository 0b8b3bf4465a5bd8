"""Certificates, made once, and trusted by the door."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.egress_web.doors import Authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the certificates of this run are."""
    return tmp_path_factory.mktemp("authority")


@pytest.fixture(scope="session")
def made_authority(authorities: Path) -> Authority:
    """An authority, made once."""
    return Authority(authorities)


@pytest.fixture
def authority(made_authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority whose servers the door trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(made_authority.file))
    return made_authority
