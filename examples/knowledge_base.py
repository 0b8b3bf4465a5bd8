"""Search a knowledge base: a bucket that an agent reads with a shell.

Here the bucket is a folder, so that this runs anywhere; use `s3://name` for a real one.
"""

import asyncio
import tempfile
from pathlib import Path

from smokebox import bucket

ARTICLES = {
    "billing/refunds.md": "# Refunds\n\nA refund takes five days.\n",
    "billing/invoices.md": "# Invoices\n\nInvoices are sent on the first of the month.\n",
    "account/password.md": "# Password\n\nReset it from the login page. Links last one hour.\n",
}


def publish(folder: str, name: str, text: str) -> None:
    """Add an article, as another program would with any client."""
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in ARTICLES.items():
            publish(folder, name, text)

        async with bucket(f"file://{folder}", read_only=True) as sandbox:
            print((await sandbox.capabilities()).describe().splitlines()[0])
            # Commands that a model would run.
            for command in (
                "find . -name '*.md' | sort",
                "grep -ril refund .",
                "tail -n +3 billing/refunds.md",
                "rm -r billing",
            ):
                result = await sandbox.exec(command)
                print(f"$ {command}\n{result.stdout}{result.stderr}", end="")

            # Another program adds an article; the next command sees it.
            publish(folder, "billing/taxes.md", "# Taxes\n\nPrices include them.\n")
            print(await sandbox.glob("billing/*.md"))


asyncio.run(main())
