"""Smokebox sandboxes inside other frameworks: one module and one extra for each.

`deepagents` is a LangChain Deep Agents backend, `inspect` an Inspect sandbox environment and
`pydantic_ai` a Pydantic AI workspace backend. All three take any `SandboxApi`.
"""

from __future__ import annotations

from smokebox.errors import MissingDependency


def missing_framework(package: str, *, extra: str) -> MissingDependency:
    """Return the error for a framework that cannot be imported."""
    return MissingDependency(
        f"this integration needs {package}, which cannot be imported.",
        hint=f"Install it: pip install 'smokebox[{extra}]'.",
        package=package,
        extra=extra,
    )
