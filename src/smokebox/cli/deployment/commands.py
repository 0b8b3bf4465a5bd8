"""Commands that package a project: build and deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from smokebox.cli.project.folder import Folder  # noqa: TC001
from smokebox.errors import Conflict

# Printed after the files of a platform.
_NEXT = {
    "systemd": """\
Next, on the server, with the wheel that `smokebox build` writes:
  python3 -m venv /opt/{name} && /opt/{name}/bin/pip install {name}.whl
  install -m 600 .env /etc/{name}.env
  cp {name}.service /etc/systemd/system/ && systemctl enable --now {name}""",
    "docker": """\
Next: smokebox build && docker build -t {name} . && docker run -p 8600:8600 -v state:/state \\
  -e SMOKEBOX_APP_KEYS -e ANTHROPIC_API_KEY {name}""",
    "compose": "Next: smokebox build && docker compose up --build",
    "kubernetes": """\
Next: smokebox build, build and push the image, set its name in deploy/kubernetes.yaml, then
  kubectl create secret generic {name} --from-env-file=.env
  kubectl apply -f deploy/kubernetes.yaml""",
    "github-actions": "Next: git add .github && git push. Each run has the wheel as an artifact.",
    "gitlab-ci": "Next: git add .gitlab-ci.yml && git push. Each run has the wheel as an artifact.",
    "render": "Next: git add render.yaml && git push, then New > Blueprint in Render's dashboard.",
}


def build(
    folder: Folder = ".",
    check: Annotated[
        bool, typer.Option("--check", help="Install the wheel, start it and send a request.")
    ] = False,
) -> int:
    """Build a wheel that serves a project, and a Dockerfile for it.

    Secrets (.env), state and tests are left out. Existing Dockerfiles are not overwritten.
    """
    from smokebox.app.project import load_project
    from smokebox.cli.deployment.package import build_wheel, read_facts
    from smokebox.cli.deployment.trial import try_wheel

    root = Path(folder).absolute()
    load_project(root)
    facts = read_facts(root)
    wheel = build_wheel(facts, root / "dist")
    typer.echo(f"  {wheel.relative_to(root)}")
    for name, text in facts.render("docker").items():
        if not (root / name).exists():
            (root / name).write_text(text)
            typer.echo(f"  {name}")
    if check:
        try_wheel(facts, wheel, lambda line: typer.echo(f"  ok: {line}"))
    return 0


def deploy(
    platform: Annotated[
        Literal[
            "systemd", "docker", "compose", "kubernetes", "github-actions", "gitlab-ci", "render"
        ],
        typer.Argument(help="Platform to write files for."),
    ],
    folder: Folder = ".",
    write: Annotated[
        bool, typer.Option("--write", help="Write the files into the project.")
    ] = False,
) -> int:
    """Print or write the files that a platform needs to run a project.

    Nothing is uploaded, and existing files are not overwritten.
    """
    from smokebox.cli.deployment.package import read_facts

    root = Path(folder).absolute()
    facts = read_facts(root)
    files = facts.render(platform)
    instructions = _NEXT[platform].format(name=facts.name)
    if not write:
        for name, text in files.items():
            typer.echo(f"# {name}\n{text}")
        typer.echo(instructions, err=True)
        return 0
    for name, text in files.items():
        if (root / name).exists() and (root / name).read_text() != text:
            raise Conflict(
                f"{name} already exists.", hint="Remove it first.", kind="file", name=name
            )
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        typer.echo(f"  {name}")
    typer.echo(f"\n{instructions}")
    return 0
