"""A project as a service of a plain server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = """\
Next, on the server, with the wheel that `smokebox build` makes:
  python3 -m venv /opt/{name} && /opt/{name}/bin/pip install {name}.whl
  install -m 600 .env /etc/{name}.env
  cp {name}.service /etc/systemd/system/ && systemctl enable --now {name}"""

_UNIT = """\
[Unit]
Description={name}, served by Smokebox
After=network-online.target
Wants=network-online.target

[Service]
ExecStart=/opt/{name}/bin/{name} --port 8600 --grace 30
# SMOKEBOX_APP_KEYS, and the keys of models.
EnvironmentFile=/etc/{name}.env
DynamicUser=yes
StateDirectory={name}
WorkingDirectory=/var/lib/{name}
Environment=SMOKEBOX_APP_STATE=/var/lib/{name} SMOKEBOX_HOME=/var/lib/{name}/home
Restart=on-failure
# What goes on has 30 seconds to end.
TimeoutStopSec=40
KillMode=mixed
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def files(facts: Facts) -> dict[str, str]:
    """The unit."""
    return {f"deploy/{facts.name}.service": _UNIT.format(name=facts.name)}
