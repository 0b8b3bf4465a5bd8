"""Images `recipe:NAME`: built once for all sandboxes, on Debian or on the programs of the host."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from building import BASE, build, build_base
from oci_images import TestImage, busybox
from registry_server import RegistryServer, run_registry
from smokebox.engine.host import Host
from smokebox.engine.images.recipe_images import HOST, NAMES, RecipeImages, check_recipe
from smokebox.engine.images.registry.access import RegistryConfig, RegistrySettings
from smokebox.engine.images.registry.reference import recipe_in_place_of
from smokebox.errors import BuildFailed, NotFound, RegistryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.wire.builds import BuildEvent

# Nothing listens there.
OFFLINE = RegistrySettings(default="127.0.0.1:1")
BASE_RECIPE = "FROM host\nRUN --mount=type=bind,target=/run/recipe ls /run/recipe > /context\n"
PYTHON_RECIPE = "FROM recipe:base\nRUN echo ran && date +%N > /stamp\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes that need no network, instead of those of Smokebox."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    files = {
        "host/base.Dockerfile": BASE_RECIPE,
        "host/python.Dockerfile": PYTHON_RECIPE,
        "host/install.sh": "exit 0\n",
        "debian/base.Dockerfile": "FROM debian:trixie-slim\nRUN echo debian > /kind\n",
        "debian/python.Dockerfile": "FROM recipe:base\nRUN cat /kind > /stamp\n",
    }
    for name, text in files.items():
        path = tmp_path / "recipes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "recipes"


@pytest_asyncio.fixture
async def offline(tmp_path: Path, folder: Path) -> AsyncIterator[Host]:
    """An engine that reaches no registry."""
    async with await Host.open(tmp_path / "home", pool=0, registries=OFFLINE) as host:
        host.recipes.folder = folder
        yield host


async def events(recipes: RecipeImages, name: str, *, no_cache: bool = False) -> list[BuildEvent]:
    return [one async for one in recipes.stream(name, no_cache=no_cache)]


async def test_a_recipe_is_built_once_and_shared_by_all_scopes(offline: Host) -> None:
    first = await offline.create("team-a-box", image="recipe:python")
    stamp = (await first.exec("cat /stamp")).stdout
    assert stamp
    second = await offline.create("team-b-box", image="recipe:python")
    assert (await second.exec("cat /stamp")).stdout == stamp
    listed = {one.names: one for one in await offline.images.list(scope="team-b-")}
    assert set(listed) == {("recipe:base",), ("recipe:python",)}
    assert listed["recipe:python",].source == "recipe:python on host"
    assert listed["recipe:python",].size > 0
    assert [one.kind for one in await events(offline.recipes, "recipe:python")] == ["image"]


async def test_without_a_registry_the_host_is_the_base_and_the_reason_is_told(
    offline: Host,
) -> None:
    found = await events(offline.recipes, "recipe:python")
    (warning,) = [one.data for one in found if one.kind == "warning"]
    assert "recipe:base is built on the programs of this host" in warning
    assert "127.0.0.1:1" in warning
    assert found[-1].names == ("recipe:python",)
    assert "ran\n" in [one.data for one in found if one.kind == "output"]
    box = await offline.create("box", image="recipe:base")
    assert "install.sh" in (await box.exec("cat /context")).stdout


async def test_those_who_ask_at_once_share_a_build_that_outlives_them(offline: Host) -> None:
    leaving = asyncio.create_task(events(offline.recipes, "recipe:python"))
    boxes = [offline.create(f"box-{n}", image="recipe:python") for n in range(3)]
    waiting = asyncio.gather(*boxes)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    stamps = {(await one.exec("cat /stamp")).stdout for one in await waiting}
    assert len(stamps) == 1


async def test_no_cache_builds_again_and_sandboxes_keep_their_image(offline: Host) -> None:
    box = await offline.create("box", image="recipe:python")
    before = (await box.exec("cat /stamp")).stdout
    await events(offline.recipes, "recipe:python", no_cache=True)
    fresh = await offline.create("fresh", image="recipe:python")
    assert (await fresh.exec("cat /stamp")).stdout != before
    await box.sleep()
    assert (await box.exec("cat /stamp")).stdout == before


async def test_a_failed_recipe_leaves_no_image_and_is_tried_again(
    offline: Host, folder: Path
) -> None:
    file = folder / "host" / "python.Dockerfile"
    file.write_text("FROM recipe:base\nRUN echo why >&2; exit 3\n")
    with pytest.raises(BuildFailed, match=r"recipe:python.*exit code 3") as caught:
        await offline.create("box", image="recipe:python")
    assert "why" in str(caught.value.fields["output"])
    assert [one.names for one in await offline.images.list()] == [("recipe:base",)]
    file.write_text(PYTHON_RECIPE)
    assert (await (await offline.create("box", image="recipe:python")).exec("ls /stamp")).success


async def test_a_recipe_outlives_the_engine_that_built_it(tmp_path: Path, folder: Path) -> None:
    for run in range(2):
        async with await Host.open(tmp_path / "home", pool=0, registries=OFFLINE) as host:
            host.recipes.folder = folder if not run else tmp_path / "gone"
            await host.create(f"box-{run}", image="recipe:base")


async def test_an_engine_that_closes_ends_the_build(tmp_path: Path, folder: Path) -> None:
    (folder / "host" / "base.Dockerfile").write_text("FROM host\nRUN echo up; sleep 60\n")
    async with await Host.open(tmp_path / "home", pool=0, registries=OFFLINE) as host:
        host.recipes.folder = folder
        async for event in host.recipes.stream("recipe:base"):
            if event.data == "up\n":
                break


async def test_a_dockerfile_starts_from_a_recipe(offline: Host) -> None:
    built = await build(offline, "FROM recipe:python\nRUN test -s /stamp && touch /mine")
    box = await offline.create("box", image=built.digest)
    assert (await box.exec("ls /mine")).success


async def test_a_build_on_a_recipe_shows_the_progress_of_the_recipe(offline: Host) -> None:
    built = await build(offline, "FROM recipe:python\nRUN true\n")
    steps = [(one.base, one.step, one.instruction) for one in built.events if one.kind == "step"]
    assert steps == [
        ("", 1, "FROM recipe:python"),
        ("recipe:base", 0, "pull debian:trixie-slim"),
        ("recipe:base", 1, "FROM host"),
        ("recipe:base", 2, BASE_RECIPE.splitlines()[1]),
        ("recipe:python", 1, "FROM recipe:base"),
        ("recipe:python", 2, PYTHON_RECIPE.splitlines()[1]),
        ("", 2, "RUN true"),
    ]
    done = {(one.base, one.step): one.seconds for one in built.events if one.kind == "done"}
    assert done["", 1] > done["recipe:python", 2] > 0
    assert [one.base for one in built.events if one.data == "ran\n"] == ["recipe:python"]
    again = await build(offline, "FROM recipe:python\nRUN touch /x\n")
    assert {one.base for one in again.events} == {""}


def mirror(registry: RegistryServer) -> RegistrySettings:
    """Return the settings of a server whose mirror is a registry of this host."""
    return RegistrySettings(
        registries={
            "docker.io": RegistryConfig(mirrors=(registry.authority,)),
            registry.authority: RegistryConfig(plain_http=True),
        }
    )


async def test_debian_is_the_base_where_the_registry_has_it(tmp_path: Path, folder: Path) -> None:
    with run_registry(tmp_path / "registry") as registry:
        busybox().push(registry.url, "library/debian", "trixie-slim")
        async with await Host.open(tmp_path / "home", pool=0, registries=mirror(registry)) as host:
            host.recipes.folder = folder
            box = await host.create("box", image="recipe:python")
            assert (await box.exec("cat /stamp /motd")).stdout == "debian\nhello"
            info = await host.images.inspect("recipe:python")
            assert info.source == "recipe:python on debian:trixie-slim"
            # Tenants get the recipe, and not the image below it.
            names = [one.names for one in await host.images.list(scope="tenant-")]
            assert names == [("recipe:base",), ("recipe:python",)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("recipe:pyton", "recipe:python"),
        ("recipe:", "There are"),
        ("recipe:../base", "'recipe:base'"),
    ],
)
async def test_an_unknown_recipe_names_the_nearest(offline: Host, name: str, hint: str) -> None:
    with pytest.raises(NotFound, match="there is no recipe") as caught:
        await offline.create("box", image=name)
    assert hint in str(caught.value.hint)


async def test_an_image_of_cloudflare_gets_a_recipe_offered(offline: Host) -> None:
    with pytest.raises(RegistryError) as caught:
        await offline.create("box", image="cloudflare/sandbox:0.9.2-python")
    assert "'recipe:python' in its place" in str(caught.value.hint)
    with pytest.raises(BuildFailed) as failed:
        await build(offline, "FROM docker.io/cloudflare/sandbox:0.9.2\n")
    assert "recipe:base" in str(failed.value)


@pytest.mark.parametrize(
    ("image", "recipe"),
    [
        ("docker.io/cloudflare/sandbox:0.9.2", "recipe:base"),
        ("cloudflare/sandbox:0.9.2-python", "recipe:python"),
        ("cloudflare/sandbox:0.9.2-opencode", "recipe:base"),
        ("cloudflare/sandbox", "recipe:base"),
        ("cloudflare/sandbox-other:1", None),
        ("python:3.12-slim", None),
    ],
)
def test_recipes_in_place_of_other_images(image: str, recipe: str | None) -> None:
    assert recipe_in_place_of(image) == recipe


def test_the_recipes_of_smokebox_are_complete() -> None:
    from smokebox.engine.images.build.parser import parse_dockerfile
    from smokebox.engine.images.build.plan import make_plan

    root = RecipeImages.default_folder()
    for kind in ("debian", HOST):
        for name in NAMES:
            check_recipe(f"recipe:{name}")
            file = root / kind / f"{name}.Dockerfile"
            assert make_plan(parse_dockerfile(file.read_text(), file=name)).stages


@pytest.mark.gvisor
async def test_recipes_built_and_registry_images_and_snapshots_start_in_gvisor(
    tmp_path: Path, folder: Path
) -> None:
    with run_registry(tmp_path / "registry") as registry:
        busybox().push(registry.url, "app", "1")
        settings = RegistrySettings(
            default="127.0.0.1:1", registries={registry.authority: RegistryConfig(plain_http=True)}
        )
        async with await Host.open(tmp_path / "home", pool=0, registries=settings) as host:
            host.recipes.folder = folder
            await build_base(host)
            recipe = await host.create("recipe", image="recipe:python", tier="gvisor")
            assert (await recipe.exec("test -s /stamp; echo $?")).stdout == "0\n"
            built = await host.create("built", image=BASE, tier="gvisor")
            assert (await built.exec("whoami")).stdout == "root\n"
            image = f"{registry.authority}/app:1"
            pulled = await host.create("pulled", image=image, tier="gvisor")
            assert (await pulled.exec("echo $GREETING; cat /motd")).stdout == "hi\nhello"
            await recipe.exec("echo kept > /workspace/f; rm /stamp")
            await recipe.snapshots.create("one")
            await recipe.exec("rm /workspace/f")
            await recipe.snapshots.restore("one")
            assert (await recipe.exec("cat f; ls /stamp")).stdout == "kept\n"


soak = pytest.mark.skipif("SMOKEBOX_SOAK" not in os.environ, reason="downloads 150 MB")


@soak
@pytest.mark.timeout(900)
async def test_the_real_recipe_has_what_agents_expect_on_the_host(tmp_path: Path) -> None:
    async with await Host.open(tmp_path / "home", pool=0, registries=OFFLINE) as host:
        await check_real_recipe(host, "recipe:python on host")


@soak
@pytest.mark.timeout(1800)
async def test_the_real_recipe_has_what_agents_expect_on_debian(
    tmp_path: Path, debian_base: Path
) -> None:
    with run_registry(tmp_path / "registry") as registry:
        base = TestImage(layers=[debian_base.read_bytes()])
        base.push(registry.url, "library/debian", "trixie-slim")
        async with await Host.open(tmp_path / "home", pool=0, registries=mirror(registry)) as host:
            await check_real_recipe(host, "recipe:python on debian:trixie-slim")


async def check_real_recipe(host: Host, source: str) -> None:
    """Build the recipe of Smokebox, print the times of its steps, and use what it has."""
    for event in await events(host.recipes, "recipe:python"):
        if event.kind in ("done", "warning"):
            step = f"{event.base} [{event.step}/{event.steps}] {event.instruction[:60]}"
            sys.stdout.write(f"{event.seconds:.1f} s {step}{event.data}\n")
    image = await host.images.inspect("recipe:python")
    sys.stdout.write(f"{image.source}: {image.size >> 20} MiB\n")
    assert image.source == source
    box = await host.create("box", image="recipe:python")
    programs = "python3 pip node npm git curl rg jq gcc make"
    found = await box.exec(f"for one in {programs}; do command -v $one || echo no $one; done")
    assert "no " not in found.stdout
    libraries = "pandas, numpy, matplotlib, PIL, openpyxl, requests, sklearn"
    assert (await box.exec(f"python3 -c 'import {libraries}'")).success
    node = await box.exec("node -p 'parseInt(process.versions.node) >= 20'")
    assert node.stdout == "true\n"
    assert "externally-managed" not in (await box.exec("pip install --no-index x")).stderr
    code = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.title('t')"
    chart = await box.contexts.run(code)
    assert any(one.png for one in chart.results), chart
