"""A project on Render, from its repository."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = "Next: git add render.yaml && git push, then New > Blueprint in Render's dashboard."

_BLUEPRINT = """\
services:
  - type: web
    name: {name}
    runtime: python
    plan: starter
    buildCommand: {build}
    startCommand: smokebox app --host 0.0.0.0 --port $PORT --grace 30
    healthCheckPath: /health
    maxShutdownDelaySeconds: 40
    disk:
      name: state
      mountPath: /var/state
      sizeGB: 5
    envVars:
      - key: PYTHON_VERSION
        value: 3.13.5
      - key: SMOKEBOX_APP_STATE
        value: /var/state
      - key: SMOKEBOX_APP_KEYS
        generateValue: true
      - key: ANTHROPIC_API_KEY
        sync: false
"""


def files(facts: Facts) -> dict[str, str]:
    """The blueprint."""
    needs = " ".join(shlex.quote(one) for one in facts.needs)
    text = _BLUEPRINT.format(name=facts.name, build=f"pip install {needs}")
    return {"render.yaml": text}
