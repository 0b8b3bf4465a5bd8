"""A page that lists the endpoints, for people: plain HTML, without any script."""

from __future__ import annotations

from html import escape
from typing import Any

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title} API</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
code {{ font-family: ui-monospace, monospace; }}
summary code b {{ display: inline-block; min-width: 4.5rem; }}
details {{ border-bottom: 1px solid #8884; padding: .4rem 0; }}
dd, p {{ margin: .3rem 0 .3rem 1rem; }}
</style>
</head>
<body>
<h1>{title} {version}</h1>
<p>{description}</p>
<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{sections}
</body>
</html>
"""


def make_page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    sections = [_section(document, tag) for tag in document["tags"]]
    sections.append("<h2>WebSockets</h2>")
    sections += [_entry("WS", path, one) for path, one in document["x-websockets"].items()]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        description=escape(info["description"]),
        sections="\n".join(sections),
    )


def _section(document: dict[str, Any], tag: dict[str, str]) -> str:
    entries = [
        _entry(method.upper(), path, one)
        for path, methods in document["paths"].items()
        for method, one in methods.items()
        if tag["name"] in one["tags"]
    ]
    return "\n".join([f"<h2>{escape(tag['description'])}</h2>", *entries])


def _entry(method: str, path: str, one: dict[str, Any]) -> str:
    names = [f"<code>{escape(field['name'])}</code>" for field in one["parameters"]]
    lines = [
        f"<details><summary><code><b>{method}</b>{escape(path)}</code> "
        f"{escape(one['summary'])}</summary>",
        f"<p>{escape(one.get('description', ''))}</p>",
        f"<p>Parameters: {', '.join(names)}.</p>" if names else "",
    ]
    bodies = one.get("requestBody", {}).get("content", {})
    lines += [f"<p>Body: {_shape(*body)}</p>" for body in bodies.items()]
    lines += [
        f"<p><code>{status}</code> {escape(answer['description'])}</p>"
        for status, answer in one.get("responses", {}).items()
    ]
    return "".join([*lines, "</details>"])


def _shape(media: str, content: dict[str, Any]) -> str:
    name = content["schema"].get("$ref", "").rpartition("/")[2]
    return f"<code>{escape(media)}</code> {escape(name)}"
