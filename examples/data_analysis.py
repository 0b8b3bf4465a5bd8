"""Data analysis with a chart, in the interpreter of a sandbox.

python examples/data_analysis.py recipe:python    # pandas and matplotlib, built on first use
python examples/data_analysis.py                  # the programs of this host, without a network
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from smokebox import CodeExecution, get_sandbox

SALES = "month,city,amount\n1,Oslo,40\n1,Lima,25\n2,Oslo,55\n2,Lima,31\n3,Oslo,38\n3,Lima,64\n"

WITH_PANDAS = """
import matplotlib.pyplot as plt
import pandas

sales = pandas.read_csv("sales.csv").pivot(index="month", columns="city", values="amount")
sales.plot.bar(title="Sales")
plt.show()
sales.sum().to_dict()
"""

# The same chart drawn by hand.
WITHOUT = """
import csv

total = {}
bars = []
for at, row in enumerate(csv.DictReader(open("sales.csv"))):
    amount = int(row["amount"])
    total[row["city"]] = total.get(row["city"], 0) + amount
    bars.append(f'<rect x="{at * 30}" y="{70 - amount}" width="20" height="{amount}"/>')

class Chart:
    def _repr_svg_(self):
        size = 'width="180" height="70"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}</svg>'

display(Chart())
total
"""


def save_charts(result: CodeExecution) -> None:
    """Write the charts of a result into files."""
    for one in result.results:
        if one.png is not None:
            Path("chart.png").write_bytes(one.png)
            print("chart.png", one.chart and one.chart["type"])
        elif one.svg is not None:
            Path("chart.svg").write_text(one.svg)
            print("chart.svg")


async def main(image: str) -> None:
    """Sum up a table and draw it."""
    sandbox = get_sandbox("data-analysis", image=image)
    try:
        await sandbox.write_file("sales.csv", SALES)
        found = await sandbox.run_code("import pandas, matplotlib")
        result = await sandbox.run_code(WITH_PANDAS if found.success else WITHOUT)
        print(result.text)
        save_charts(result)
    finally:
        await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "host"))
