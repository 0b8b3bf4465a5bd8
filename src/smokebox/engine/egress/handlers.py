"""What finds the function that a policy names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.egress.importing import find_handler

if TYPE_CHECKING:
    from smokebox.egress.handler import Handler, HandlerOption


class Handlers:
    """Functions as they are; what is named by its place is imported, once."""

    async def resolve(self, option: HandlerOption) -> Handler:
        """The handler itself. Raises `InvalidOption` where there is none."""
        if isinstance(option, str):
            # A module of a user's may take its time.
            return await asyncio.to_thread(find_handler, option)
        return option
