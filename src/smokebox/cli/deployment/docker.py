"""An image of a project's wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = """\
Next: smokebox build && docker build -t {name} . && docker run -p 8600:8600 -v state:/state \\
  -e SMOKEBOX_APP_KEYS -e ANTHROPIC_API_KEY {name}"""

_DOCKERFILE = """\
# Build the wheel first: smokebox build
FROM python:3.13-slim

RUN useradd --create-home --uid 10001 app && install -d -o app -g app /state
COPY dist/{wheel} /tmp/
RUN pip install --no-cache-dir /tmp/{wheel} && rm /tmp/{wheel}

USER app
WORKDIR /state
# What was accepted outlives the container where this is a volume.
VOLUME /state
ENV SMOKEBOX_APP_STATE=/state SMOKEBOX_HOME=/state/home PYTHONUNBUFFERED=1
EXPOSE 8600
HEALTHCHECK --start-period=20s CMD ["python", "-c", \\
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8600/health', timeout=5)"]
# It wants SMOKEBOX_APP_KEYS, and has 30 seconds to end what goes on after SIGTERM.
CMD ["{name}", "--host", "0.0.0.0", "--port", "8600", "--grace", "30"]
"""

_IGNORED = """\
*
!dist/*.whl
"""


def files(facts: Facts) -> dict[str, str]:
    """The definition of the image, and what of the folder it may see."""
    return {
        "Dockerfile": _DOCKERFILE.format(name=facts.name, wheel=facts.wheel),
        ".dockerignore": _IGNORED,
    }
