"""Who may see which preview: 404 for a bad token, 410 for a run that is over, and no waking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.names import check_id
from smokebox.engine.ports import is_token
from smokebox.errors import InvalidOption, NotFound, SandboxGone, SmokeboxError, Unauthorized
from smokebox.server.previews.pages import Refusal
from smokebox.server.previews.signing import LENGTH

if TYPE_CHECKING:
    from smokebox.engine import Host, Sandbox
    from smokebox.engine.ports import Ports
    from smokebox.engine.record.rows import PortRow
    from smokebox.engine.run import Run
    from smokebox.server.keys import Keys
    from smokebox.server.previews.signing import Signer
    from smokebox.wire.preview import Target


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may pass: to a port of a run."""

    ports: Ports
    run: Run
    port: int


class Gate:
    """Looks at each request anew: what was revoked, or has ended, is so at once."""

    def __init__(self, host: Host, keys: Keys, signer: Signer) -> None:
        self._host = host
        self._keys = keys
        self._signer = signer

    def find(self, target: Target) -> Sandbox:
        """The sandbox of a preview. Raises `Refusal`."""
        try:
            return self._host.sandbox(check_id(target.id))
        except InvalidOption:
            raise unknown() from None

    def admit(self, sandbox: Sandbox, target: Target, told: bytes | None) -> Admitted | None:
        """Let a request pass, or raise `Refusal`; None where `Ports.load` has to come first.

        `told` is its header Authorization.
        """
        ports = sandbox.ports
        if ports.rows is None:
            return None
        row = ports.rows.get(target.port)
        if row is None:
            raise unknown()
        self._check(row, target, told)
        run = ports.run_of(row)
        if run is None:
            raise _stale(target)
        return Admitted(ports, run, target.port)

    def _check(self, row: PortRow, target: Target, told: bytes | None) -> None:
        if len(target.token) == LENGTH:
            if not self._signer.is_good(row, target.token):
                raise unknown()
        elif not is_token(row, target.token):
            raise unknown()
        elif row.private:
            try:
                self._keys.holder(told).check_sandbox(row.sandbox_id)
            except SmokeboxError as error:
                raise Refusal(
                    401,
                    Unauthorized(
                        "this preview is for who has a key of this server.",
                        hint="Ask whoever exposed it for a URL that expires, or send the header "
                        "Authorization: Bearer <key>.",
                        reason="missing" if told is None else "unknown",
                    ),
                ) from error


def unknown() -> Refusal:
    """The refusal of what nobody exposed, or not to who asks."""
    return Refusal(
        404,
        NotFound(
            "nothing is exposed by this name.",
            hint="Its port is not exposed any more, or the URL is not whole, or has expired.",
            kind="preview",
        ),
    )


def _stale(target: Target) -> Refusal:
    return Refusal(
        410,
        SandboxGone(
            f"sandbox {target.id} does not run as it did when port {target.port} was exposed.",
            hint="Start what listens there again, and call expose_port() once more: the URL stays.",
            reason="stale",
            sandbox_id=target.id,
        ),
    )
