"""What may leave a sandbox, and what happens to it on the way: policy and handlers.

The door that holds to them is the engine's, or the virtual sandbox's own. Names are imported
when they are first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.egress.environment import Secrets as Secrets
    from smokebox.egress.handler import Context as Context
    from smokebox.egress.handler import Handler as Handler
    from smokebox.egress.handler import Refused as Refused
    from smokebox.egress.message import Request as Request
    from smokebox.egress.message import Response as Response
    from smokebox.egress.policy import Egress as Egress
    from smokebox.egress.policy import Verdict as Verdict
    from smokebox.egress.ready import basic as basic
    from smokebox.egress.ready import bearer as bearer
    from smokebox.egress.ready import chain as chain
    from smokebox.egress.ready import header as header
    from smokebox.egress.ready import log as log
    from smokebox.egress.recording import record as record
    from smokebox.egress.recording import replay as replay
    from smokebox.egress.signing import sign_s3 as sign_s3

_HOME = {
    "Context": "handler",
    "Egress": "policy",
    "Handler": "handler",
    "Refused": "handler",
    "Request": "message",
    "Response": "message",
    "Secrets": "environment",
    "Verdict": "policy",
    "basic": "ready",
    "bearer": "ready",
    "chain": "ready",
    "header": "ready",
    "log": "ready",
    "record": "recording",
    "replay": "recording",
    "sign_s3": "signing",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox.egress' has no attribute {name!r}")
    value: object = getattr(import_module(f"smokebox.egress.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
