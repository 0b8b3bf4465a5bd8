"""A multi-stage build of 20 instructions, by us and by Debian's buildah, cold and cached.

    python bench/build.py [--repeats 5]

Both start from the same small base image, and their stores are on one disk. Goals: at most 0.4 of
buildah's time cold, and 0.2 cached. Run it as root.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from smokebox.engine.host import Host
from table import Table, in_turns

COLD, CACHED = 0.4, 0.2
TEXT = """
ARG base=base:1
FROM $base AS tools
WORKDIR /tools
COPY tool.sh bin/
RUN chmod 755 bin/tool.sh
RUN seq 1000 > numbers
RUN mkdir -p lib && cp numbers lib/copy

FROM $base AS compiled
WORKDIR /src
COPY src ./
RUN cat *.txt > all
RUN wc -l all > count
RUN mkdir /out && cp all count /out/

FROM $base
ENV MODE=production LEVEL=3
WORKDIR /app
COPY --from=tools /tools /opt/tools
COPY --from=compiled /out ./data
COPY config.txt /etc/app.conf
RUN /opt/tools/bin/tool.sh > made
RUN echo "$MODE $LEVEL" > mode
CMD ["sh", "-c", "cat mode"]
"""
FILES: dict[str, str | bytes] = {
    "tool.sh": "#!/bin/sh\necho tool\n",
    "config.txt": "a=1\n",
    **{f"src/{number}.txt": f"line {number}\n" * 50 for number in range(50)},
}


async def main(repeats: int) -> int:
    """Measure, and return 1 if a goal is missed."""
    if shutil.which("buildah") is None:
        sys.exit("buildah is missing: apt-get install buildah")
    version = subprocess.run(["buildah", "--version"], capture_output=True, text=True).stdout
    # The base image and the driver of buildah are those of the tests.
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from buildah import Buildah
    from building import build, build_base

    table = Table()
    table.text(version.strip())
    with tempfile.TemporaryDirectory(prefix="smokebox-bench-") as folder:
        oracle = Buildah(Path(folder) / "buildah")
        async with await Host.open(Path(folder) / "home", pool=0) as host:
            await build_base(host)

            async def ours_cold() -> None:
                await build(host, TEXT, FILES, no_cache=True)

            async def theirs_cold() -> None:
                await asyncio.to_thread(oracle.build, TEXT, FILES, "bench:1", cache=False)

            async def ours_cached() -> None:
                await build(host, TEXT, FILES)

            async def theirs_cached() -> None:
                await asyncio.to_thread(oracle.build, TEXT, FILES, "bench:1", cache=True)

            await in_turns(ours_cold, theirs_cold, theirs_cached, repeats=1)
            cold = await in_turns(ours_cold, theirs_cold, repeats=repeats)
            cached = await in_turns(ours_cached, theirs_cached, repeats=repeats)
        oracle.close()
    table.line("build of 20 instructions, cold", cold[0], to="buildah", other=cold[1])
    table.line("the same, cached", cached[0], to="buildah", other=cached[1])
    ratios = [
        statistics.median(ours) / statistics.median(theirs) for ours, theirs in (cold, cached)
    ]
    return int(ratios[0] > COLD or ratios[1] > CACHED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    sys.exit(asyncio.run(main(parser.parse_args().repeats)))
