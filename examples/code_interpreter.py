"""Code contexts: variables that persist, results in several formats, a timeout, a stream.

python examples/code_interpreter.py
"""

from __future__ import annotations

import asyncio

from smokebox import CodeError, OutputChunk, get_sandbox

LOAD = """
import csv, io, statistics
rows = list(csv.DictReader(io.StringIO('''city,degrees
Oslo,4
Cairo,29
Lima,18
''')))
degrees = {row['city']: int(row['degrees']) for row in rows}
"""

TABLE = """
class Table:
    def __repr__(self):
        return '\\n'.join(f'{city:8}{value:>4}' for city, value in degrees.items())

    def _repr_html_(self):
        return '<table>' + ''.join(f'<tr><td>{city}' for city in degrees) + '</table>'

Table()
"""


async def main() -> None:
    """Analyse data, run code for too long, and raise an error."""
    sandbox = get_sandbox("code-example")
    context = await sandbox.create_code_context(language="python", timeout=30)
    await sandbox.run_code(LOAD, context=context)
    table = (await sandbox.run_code(TABLE, context=context)).results[0]
    print(table.text, table.formats(), sep="\n")

    mean = await sandbox.run_code("statistics.mean(degrees.values())", context=context)
    print(f"mean {mean.text}, from code {mean.count} of its context")

    late = await sandbox.run_code("while True: pass", context=context, timeout=0.5)
    print(f"interrupted: {late.timed_out}, context still there: {not late.context_ended}")

    code = "for city in degrees: print(city)\ndegrees['Rome']"
    async with sandbox.run_code_stream(code, context=context) as stream:
        async for event in stream:
            if isinstance(event, OutputChunk):
                print(event.data, end="")
            elif isinstance(event, CodeError):
                print(f"line {event.line}: {event.name}: {event.message}")
    await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
