"""The log of a server: one line per request, and the messages of all modules.

`smokebox serve` calls `configure`. A program that embeds a server keeps its own logging.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.types import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]

# Secrets that a URL may contain.
_SECRET = re.compile(r"((?:authorization|token|key|signature)=)[^&\s\"']+", re.IGNORECASE)
_requests: Any = None


def configure(json: bool = False, level: Level = "info") -> None:
    """Log to standard error, as text or as lines of JSON."""
    global _requests
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor]
    if json:
        last = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_json),
        ]
    else:
        # Not rich's tracebacks: they show local variables, and API keys are among them.
        plain = structlog.dev.plain_traceback
        last = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared, _redact_event],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # uvicorn logs each start and each WebSocket, and so do we.
    logging.getLogger("uvicorn").setLevel(max(number, logging.WARNING))
    # Bound once, which saves a lookup per request.
    _requests = structlog.get_logger().bind()


def log_request(
    request_id: str,
    principal: str,
    method: str,
    route: str,
    path: str,
    status: int,
    seconds: float,
) -> None:
    """Log a request, without its query, which may contain secrets."""
    if _requests is None:
        return
    _requests.info(
        "request",
        request_id=request_id,
        principal=principal,
        method=method,
        route=route,
        # A terminal would interpret control characters in it.
        path=path if path.isprintable() else ascii(path),
        status=status,
        ms=round(seconds * 1000, 1),
    )


def redact(text: str) -> str:
    """Remove the secrets of URLs from a text."""
    return _SECRET.sub(r"\1...", text)


def _redact_event(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event["event"] = redact(str(event["event"]))
    return event


def _json(value: object, **_: object) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()
