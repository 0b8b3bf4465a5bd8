"""Egress of sandboxes: the policy, handlers of requests, and their enforcement.

`policy` and `layers` hold the rules, `handler` and `builtin_handlers` the functions that requests
pass, and `outbound` enforces both for every kind of sandbox. Names are imported when they are
first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.egress.builtin_handlers import basic as basic
    from smokebox.egress.builtin_handlers import bearer as bearer
    from smokebox.egress.builtin_handlers import chain as chain
    from smokebox.egress.builtin_handlers import header as header
    from smokebox.egress.builtin_handlers import log as log
    from smokebox.egress.builtin_handlers import restrict as restrict
    from smokebox.egress.handler import Handler as Handler
    from smokebox.egress.handler import HandlerContext as HandlerContext
    from smokebox.egress.handler import Refused as Refused
    from smokebox.egress.message import Request as Request
    from smokebox.egress.message import Response as Response
    from smokebox.egress.policy import Egress as Egress
    from smokebox.egress.policy import Verdict as Verdict
    from smokebox.egress.recorder import record as record
    from smokebox.egress.recorder import replay as replay
    from smokebox.egress.s3_signature import sign_s3 as sign_s3
    from smokebox.project import Secrets as Secrets

_MODULES = {
    "HandlerContext": "handler",
    "Egress": "policy",
    "Handler": "handler",
    "Refused": "handler",
    "Request": "message",
    "Response": "message",
    "Secrets": "smokebox.project",
    "Verdict": "policy",
    "basic": "builtin_handlers",
    "bearer": "builtin_handlers",
    "chain": "builtin_handlers",
    "header": "builtin_handlers",
    "log": "builtin_handlers",
    "record": "recorder",
    "replay": "recorder",
    "restrict": "builtin_handlers",
    "sign_s3": "s3_signature",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'smokebox.egress' has no attribute {name!r}")
    if not module.startswith("smokebox."):
        module = f"smokebox.egress.{module}"
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
