"""Builds in an engine of an ordinary user, with one id in each sandbox."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from building import BASE, build, tree
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from smokebox.engine.host import Host

HERE = Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an ordinary user already")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("file", "selection"),
    [
        ("test_builds.py", "runs_heredocs or commands_with_env or triggers"),
        ("test_build_cache.py", "every_step or scopes or secrets or context_and_stages"),
        ("test_build_ends.py", "closing or failed_command or killed"),
        ("test_unprivileged_builds.py", "one_id"),
    ],
)
def test_builds_as_an_ordinary_user(file: str, selection: str) -> None:
    rerun_as_nobody(HERE / file, selection)


async def test_one_id_owns_everything_and_users_are_root(based: Host) -> None:
    if os.geteuid() == 0:
        pytest.skip("root has a range of ids for each sandbox")
    built = await build(
        based,
        f"FROM {BASE}\nUSER app\nWORKDIR /w\nCOPY --chown=app:team a /a\nRUN id -u; touch /x",
        {"a": "a"},
    )
    assert built.output == "0\n"
    assert built.warnings == ["the engine has one user id: app is root of this step"]
    found = await tree(based, built.digest)
    assert {owner for one in found.values() for owner in one[2:4]} == {0}
    image = await based.builds.catalog.get(built.digest)
    assert image is not None
    assert image.config.user == "app"
