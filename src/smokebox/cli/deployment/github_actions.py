"""A project tested and packed by GitHub Actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.deployment.checking import lines

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = "Next: git add .github && git push. The wheel is an artifact of each run."

_WORKFLOW = """\
name: test
on: [push, pull_request]
permissions:
  contents: read
jobs:
  test:
    runs-on: ubuntu-latest
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.13"
      - run: |
{script}
      - uses: actions/upload-artifact@v4
        with:
          name: wheel
          path: dist/*.whl
"""


def files(facts: Facts) -> dict[str, str]:
    """The workflow."""
    script = "\n".join(f"          {line}" for line in lines(facts))
    return {".github/workflows/test.yml": _WORKFLOW.format(script=script)}
