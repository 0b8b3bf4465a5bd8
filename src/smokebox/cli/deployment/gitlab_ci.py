"""A project tested and packed by GitLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.deployment.checking import lines

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = "Next: git add .gitlab-ci.yml && git push. The wheel is an artifact of each run."

_PIPELINE = """\
test:
  image: python:3.13-slim
  timeout: 15 minutes
  script:
{script}
  artifacts:
    paths:
      - dist/*.whl
"""


def files(facts: Facts) -> dict[str, str]:
    """The pipeline."""
    script = "\n".join(f"    - {line}" for line in lines(facts))
    return {".gitlab-ci.yml": _PIPELINE.format(script=script)}
