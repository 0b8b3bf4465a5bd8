"""Handlers that are named by where they are: `package.module:name`."""

from __future__ import annotations

import functools
import importlib

from smokebox.egress.handler import Handler, HandlerOption, check_handler
from smokebox.errors import InvalidOption


def find_handler(handler: HandlerOption) -> Handler:
    """A handler itself, or the one that is imported from where it is said to be.

    Raises `InvalidOption` where there is none.
    """
    return _load(handler) if isinstance(handler, str) else handler


@functools.lru_cache(256)
def _load(path: str) -> Handler:
    check_handler("handler", path)
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise InvalidOption(
            f"there is no handler {path!r}: {error}.",
            hint="It is imported by the server, from where the server's Python finds modules.",
            option="handler",
            value=path,
        ) from error
    except Exception as error:
        raise InvalidOption(
            f"the module of the handler {path!r} cannot be imported: {type(error).__name__}.",
            hint=f"Try it where the server runs: python -c 'import {module}'.",
            option="handler",
            value=path,
        ) from error
    if not callable(found):
        raise InvalidOption(
            f"{path!r} is {type(found).__name__}, and no handler.",
            hint="Write `async def handler(request, env, context)`.",
            option="handler",
            value=path,
        )
    check_handler("handler", found)
    handler: Handler = found
    return handler
