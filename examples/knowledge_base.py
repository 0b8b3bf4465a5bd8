"""Answers questions from a knowledge base: a bucket that an agent searches with a shell.

Here the bucket is a folder, so that it runs anywhere; `s3://name` is the same but for the URL.
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
    """What another program does, with any client it likes."""
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in ARTICLES.items():
            publish(folder, name, text)

        async with bucket(f"file://{folder}", read_only=True) as sandbox:
            print((await sandbox.capabilities()).describe().splitlines()[0])
            # What a model would call, one tool after another.
            for command in (
                "find . -name '*.md' | sort",
                "grep -ril refund .",
                "tail -n +3 billing/refunds.md",
                "rm -r billing",
            ):
                result = await sandbox.exec(command)
                print(f"$ {command}\n{result.stdout}{result.stderr}", end="")

            # Somebody adds an article; the next command sees it.
            publish(folder, "billing/taxes.md", "# Taxes\n\nPrices include them.\n")
            print(await sandbox.glob("billing/*.md"))


asyncio.run(main())
