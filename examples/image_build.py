"""Build an image in two stages: a program is packed in the first, and alone in the second."""

import asyncio
from pathlib import Path

from smokebox import connect

DOCKERFILE = """\
FROM host AS packed
WORKDIR /build
COPY src ./src
RUN python3 -m zipapp src --main words:main --output words.pyz

FROM host
COPY --from=packed /build/words.pyz /opt/words.pyz
ENV LANGUAGE=en
WORKDIR /srv
RUN echo "two words" | python3 /opt/words.pyz > tried
"""
PROGRAM = """\
import sys

def main():
    print(len(sys.stdin.read().split()), "words")
"""


async def main() -> None:
    folder = Path("words")
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "src" / "words.py").write_text(PROGRAM)
    async with connect() as client:
        events = client.builds.stream(folder, names=["words:1"])
        async for event in events:
            if event.kind == "done":
                state = "cached" if event.cached else f"{event.seconds:.2f} s"
                print(f"[{event.step}/{event.steps}] {event.instruction}: {state}")
        async with await client.create(image="words:1") as sandbox:
            result = await sandbox.exec("cat tried; echo one | python3 /opt/words.pyz")
            print(result.stdout, end="")


if __name__ == "__main__":
    asyncio.run(main())
