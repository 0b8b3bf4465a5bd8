"""The log of a server: a line for each request, and what all its parts have to say.

Nothing is set up until `configure` is called, which `smokebox serve` does: a program that
has a server in it keeps its own log.
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

# What a URL may carry that opens something.
_SECRET = re.compile(r"((?:authorization|token|key|signature)=)[^&\s\"']+", re.IGNORECASE)
_requests: Any = None


def configure(json: bool = False, level: Level = "info") -> None:
    """Write the log of this process to its standard error, as text or as lines of JSON."""
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
        # Not rich's tracebacks, which show what variables hold: keys of callers are among them.
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
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared, _redact],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # It tells of each start and each WebSocket, which we do.
    logging.getLogger("uvicorn").setLevel(max(number, logging.WARNING))
    # Bound once: each request would look it up.
    _requests = structlog.get_logger().bind()


def request(
    request_id: str,
    principal: str,
    method: str,
    route: str,
    path: str,
    status: int,
    seconds: float,
) -> None:
    """Write the line of a request. Its query is left out: it may open something."""
    if _requests is None:
        return
    _requests.info(
        "request",
        request_id=request_id,
        principal=principal,
        method=method,
        route=route,
        # A terminal would do what is in it.
        path=path if path.isprintable() else ascii(path),
        status=status,
        ms=round(seconds * 1000, 1),
    )


def redacted(text: str) -> str:
    """A text without the secrets of the URLs in it."""
    return _SECRET.sub(r"\1...", text)


def _redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event["event"] = redacted(str(event["event"]))
    return event


def _json(value: object, **_: object) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()
