"""A project on one host with Docker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = "Next: smokebox build && docker compose up --build"

_COMPOSE = """\
# The image is that of the Dockerfile: smokebox build
services:
  app:
    build: .
    image: {name}:{version}
    # SMOKEBOX_APP_KEYS, and the keys of models.
    env_file: .env
    ports:
      - "127.0.0.1:8600:8600"
    volumes:
      - state:/state
    restart: unless-stopped
    # What goes on has 30 seconds to end.
    stop_grace_period: 40s
volumes:
  state: {{}}
"""


def files(facts: Facts) -> dict[str, str]:
    """The file of Compose."""
    return {"compose.yaml": _COMPOSE.format(name=facts.name, version=facts.version)}
