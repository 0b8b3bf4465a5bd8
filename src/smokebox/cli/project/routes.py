"""What an app offers, with lines to try from another shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from smokebox.app.served import ServedAgent

if TYPE_CHECKING:
    from smokebox.app.project import Project, Served

_KEY = """ \\
    -H "authorization: Bearer $SMOKEBOX_APP_KEY\""""


def print_routes(project: Project) -> None:
    """Each agent and workflow with its URL, and each file that could not be taken in."""
    for name, agent in project.agents.items():
        typer.echo(f"  POST /agents/{name}/{{id}}{_about(agent)}")
    for name, workflow in project.workflows.items():
        typer.echo(f"  POST /workflows/{name}{_about(workflow)}")
    if project.site is not None:
        typer.echo("  and those of app.py")
    for fault in project.faults.values():
        typer.secho(f"  {fault.message}", err=True, fg="red")
        if fault.hint:
            typer.echo(f"    {fault.hint}", err=True)


def print_lines_to_try(project: Project, url: str, *, keys: bool) -> None:
    """A request for the first of each, as a shell has it."""
    key = _KEY if keys else ""
    typer.echo("\nTry from another shell:\n")
    for name, agent in list(project.agents.items())[:1]:
        body = '{"message": "Hello"}' if isinstance(agent, ServedAgent) else "{}"
        typer.echo(f"  curl '{url}/agents/{name}/me?wait=result' -d '{body}'{key}")
    for name in list(project.workflows)[:1]:
        body = '{"document": "# Plan"}' if name == "review" else "{}"
        typer.echo(f"  curl '{url}/workflows/{name}?wait=result' -d '{body}'{key}")
    typer.echo("\nFiles are taken in anew when they change. Ctrl-C stops.\n")


def _about(served: Served) -> str:
    if isinstance(served, ServedAgent):
        return f"   {served.agent.description}".rstrip()
    told = "" if served.schedule is None else f"   {served.schedule}"
    if not served.trigger.open:
        return f"{told}   (not open to requests)"
    return told if served.trigger.signature is None else f"{told}   (signed)"
