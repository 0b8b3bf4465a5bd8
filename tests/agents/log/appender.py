"""Appends to a session until it is killed, and prints each durable head.

    appender.py STORE SESSION

Each append has three records. A line is printed once it is durable.
"""

from __future__ import annotations

import asyncio
import sys

from smokebox.agents.log.persistence import open_store
from smokebox.agents.log.records import MessageAdded
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import Text, UserMessage
from smokebox.errors import SessionBusy


async def work(place: str, session: str) -> None:
    store = open_store(place)
    try:
        writer = await store.open(SessionKey("agent", "one", session))
    except SessionBusy:
        sys.stdout.write("busy\n")
        sys.stdout.flush()
        await store.aclose()
        return
    while True:
        number = writer.head // 3
        texts = [f"{number}.{part}" + "x" * (number * 97 % 3000) for part in range(3)]
        head = await writer.append([MessageAdded("w", UserMessage((Text(one),))) for one in texts])
        sys.stdout.write(f"{head}\n")
        sys.stdout.flush()


asyncio.run(work(sys.argv[1], sys.argv[2]))
