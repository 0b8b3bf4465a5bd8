"""`smokebox import`: a wrangler.jsonc becomes a smokebox.toml."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.cli.project.wrangler import convert, parse_jsonc
from smokebox.client.bindings import sandbox_bindings
from smokebox.errors import InvalidOption
from smokebox.project import load_config

if TYPE_CHECKING:
    from cli.terminal import Run

# The two images of the seed's page, with what people add.
WRANGLER = """{
  // Bindings of the worker.
  "$schema": "https://workers.cloudflare.com/schema/wrangler.json",
  "name": "my-agent", /* not a
  URL: */ "compatibility_date": "2026-04-01",
  "durable_objects": {
    "bindings": [
      { "class_name": "PyBoxSandbox", "name": "PyBox" },
      { "class_name": "NodeSandbox", "name": "NodeBox" },
      { "class_name": "Counter", "name": "COUNTER" },
    ]
  },
  "migrations": [{ "tag": "v1", "new_sqlite_classes": ["PyBoxSandbox", "NodeSandbox"] }],
  "containers": [
    { "class_name": "PyBoxSandbox", "image": "./docker/python.Dockerfile",
      "instance_type": "basic", "max_instances": 3 },
    { "class_name": "NodeSandbox", "image": "docker/node.Dockerfile",
      "instance_type": { "vcpu": 1, "memory_mib": 1024, "disk_mb": 4000 } },
  ],
  "r2_buckets": [{ "binding": "KNOWLEDGE_BASE", "bucket_name": "my-knowledge-base" }],
}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a wrangler.jsonc and two Dockerfiles."""
    (tmp_path / "wrangler.jsonc").write_text(WRANGLER)
    (tmp_path / "docker").mkdir()
    python = "# Tools\nFROM docker.io/cloudflare/sandbox:0.9.2-python\nRUN true\n"
    (tmp_path / "docker" / "python.Dockerfile").write_text(python)
    (tmp_path / "docker" / "node.Dockerfile").write_text("FROM node:22-slim\n")
    return tmp_path


def imported(**config: Any) -> Any:
    """Convert a configuration, and return the tables."""
    return tomllib.loads(convert(config, Path("wrangler.json")).text)


def test_bindings_get_images_and_limits(project: Path, run: Run) -> None:
    done = run("import", str(project / "wrangler.jsonc"))
    assert (done.returncode, done.stderr) == (0, "")
    config = load_config(project)
    bindings = sandbox_bindings(config)
    assert bindings["PyBox"].settings.image == str(project / "docker/python.Dockerfile")
    assert bindings["PyBox"].settings.limits == "basic"
    assert bindings["NodeBox"].settings.image == str(project / "docker/node.Dockerfile")
    limits = {"cpu": 1, "memory": "1024MiB", "disk": "4000MB"}
    assert bindings["NodeBox"].settings.limits == limits
    assert config.buckets == {"KNOWLEDGE_BASE": {"bucket": "my-knowledge-base"}}


def test_what_has_no_counterpart_is_listed(project: Path, run: Run) -> None:
    shown = run("import", str(project / "wrangler.jsonc")).stdout
    for name in ("migrations", "compatibility_date", "name", "max_instances", "Counter"):
        assert name in shown
    assert "schema" not in shown
    assert (
        "./docker/python.Dockerfile: write FROM recipe:python if "
        "docker.io/cloudflare/sandbox:0.9.2-python cannot be pulled" in shown
    )


def test_an_existing_file_is_kept_without_force(project: Path, run: Run) -> None:
    target = project / "smokebox.toml"
    target.write_text("mine")
    done = run("import", str(project / "wrangler.jsonc"))
    assert (done.returncode, target.read_text()) == (1, "mine")
    assert "--force" in done.stderr
    assert run("import", str(project / "wrangler.jsonc"), "--force").returncode == 0
    assert "[sandboxes.PyBox]" in target.read_text()
    assert sorted(one.name for one in project.iterdir()) == [
        "docker",
        "smokebox.toml",
        "wrangler.jsonc",
    ]


def test_toml_and_json_are_read_too(tmp_path: Path, run: Run) -> None:
    text = '[[r2_buckets]]\nbinding = "B"\nbucket_name = "b"\n'
    (tmp_path / "wrangler.toml").write_text(f'account_id = "abc"\n{text}')
    assert run("import", str(tmp_path / "wrangler.toml")).returncode == 0
    endpoint = "https://abc.r2.cloudflarestorage.com"
    assert load_config(tmp_path).buckets == {"B": {"bucket": "b", "endpoint": endpoint}}
    content = {"r2_buckets": [{"binding": "C", "bucket_name": "c"}]}
    (tmp_path / "wrangler.json").write_text(json.dumps(content))
    assert run("import", str(tmp_path / "wrangler.json"), "--force").returncode == 0
    assert list(load_config(tmp_path).buckets) == ["C"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "// no comment", /* c */ "b": [1, 2,],}', {"a": "// no comment", "b": [1, 2]}),
        ('{"a": "x,]", "b": "\\"/*"} // end', {"a": "x,]", "b": '"/*'}),
        ("/**/[]", []),
    ],
)
def test_jsonc_has_comments_and_trailing_commas(text: str, value: object) -> None:
    assert parse_jsonc(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n// c\n"a": }', "line 3"),
        ("[]", "is not an object"),
        ("[" * 100_000, "is not JSON"),
        ('{"containers": {}}', "containers is a list of tables"),
        ('{"containers": [{"image": "x"}]}', "containers.class_name is missing"),
        ('{"containers": [{"class_name": "X"}]}', "containers X.image is missing"),
        ('{"durable_objects": []}', "durable_objects is a table"),
        ('{"r2_buckets": [{"binding": "B"}]}', "r2_buckets.bucket_name is missing"),
        (
            '{"r2_buckets": [{"binding": "B", "bucket_name": "1"},'
            ' {"binding": "B", "bucket_name": "2"}]}',
            "one name to two bindings",
        ),
    ],
)
def test_bad_input_is_named_and_writes_nothing(
    tmp_path: Path, run: Run, text: str, message: str
) -> None:
    file = tmp_path / "wrangler.jsonc"
    file.write_text(text)
    done = run("import", str(file))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["wrangler.jsonc"]


def test_a_missing_or_unknown_file_is_named(tmp_path: Path, run: Run) -> None:
    assert "wrangler.jsonc" in run("import", str(tmp_path / "wrangler.jsonc")).stderr
    assert "no configuration" in run("import", str(tmp_path / "wrangler.yaml")).stderr


def test_values_cannot_add_lines_to_the_file() -> None:
    evil = 'x"\n[sandboxes.Evil]\nimage = "host'
    containers = [{"class_name": evil, "image": evil, "instance_type": {"vcpu": evil}}]
    buckets = [{"binding": evil, "bucket_name": evil, "jurisdiction": evil}]
    tables = imported(containers=containers, r2_buckets=buckets)
    assert tables == {
        "sandboxes": {evil: {"image": evil}},
        "buckets": {evil: {"bucket": evil}},
    }


def test_an_instance_type_that_is_not_known_is_listed() -> None:
    container = {"class_name": "Sandbox", "image": "x:1", "instance_type": "huge"}
    found = convert({"containers": [container]}, Path("wrangler.json"))
    assert tomllib.loads(found.text) == {"sandboxes": {"Sandbox": {"image": "x:1"}}}
    assert any("'huge'" in note for note in found.notes)
    dev = imported(containers=[{**container, "instance_type": "dev"}])
    assert dev["sandboxes"]["Sandbox"]["limits"] == "lite"


def test_a_list_is_never_taken_for_a_table() -> None:
    with pytest.raises(InvalidOption, match="a list of tables, not"):
        convert({"r2_buckets": ["x"]}, Path("wrangler.json"))
