"""Two kinds of sandboxes by name, each with an image of its own, built when they first start."""

import asyncio
from pathlib import Path

from smokebox import env, get_sandbox

FILES = {
    "smokebox.toml": """\
[sandboxes.PyBox]
image = "./docker/python.Dockerfile"

[sandboxes.TextBox]
image = "./docker/text.Dockerfile"
limits = "lite"
""",
    "docker/python.Dockerfile": """\
FROM host
WORKDIR /workspace
COPY tables.py /opt/lib/
ENV PYTHONPATH=/opt/lib
""",
    "docker/tables.py": "def total(rows):\n    return sum(rows)\n",
    "docker/text.Dockerfile": """\
FROM host
ARG words="to be or not to be"
RUN echo "$words" | tr ' ' '\\n' | sort | uniq -c > /counts
""",
}


def write_files() -> None:
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


async def main() -> None:
    write_files()
    python = get_sandbox(env.PyBox, "user-42-python")
    text = get_sandbox(env.TextBox, "user-42-text")
    try:
        result = await python.exec("python3 -c 'import tables; print(tables.total([2, 40]))'")
        print(result.stdout, end="")
        print((await text.exec("cat /counts")).stdout, end="")
    finally:
        await python.destroy()
        await text.destroy()


if __name__ == "__main__":
    asyncio.run(main())
