"""Review a small project in a virtual sandbox: run checks, and try a change on a fork."""

import asyncio

from smokebox import virtual
from smokebox.sandbox.virtual import VirtualLimits, VirtualSandbox

FILES = {
    "app/orders.py": "# NOTE: no rounding\ndef total(items):\n    return sum(map(price, items))\n",
    "app/mail.py": "PASSWORD = 'hunter2'\n\n\ndef send(to):\n    print('to', to)  # NOTE: no log\n",
    "data/orders.json": '[{"id": 1, "price": 12.5}, {"id": 2, "price": 30}, {"id": 3, "price": 7}]',
}

CHECKS = {
    "lines of Python": "find app -name '*.py' -exec cat {} + | wc -l",
    "notes": "grep -rn NOTE app | sort",
    "secrets in the code": "grep -rnE \"(PASSWORD|TOKEN) *= *'[^']+'\" app",
    "revenue": "jq '[.[].price] | add' data/orders.json",
}


async def review(sandbox: VirtualSandbox) -> None:
    """Print the result of each check."""
    for name, script in CHECKS.items():
        result = await sandbox.exec(script)
        found = result.stdout.strip() or "nothing"
        print(f"{name}: {found}" if "\n" not in found else f"{name}:\n{found}")


async def main() -> None:
    """Review the project, fix it on a fork, and restore the snapshot of the fork."""
    # Scripts of a model get seconds, not minutes.
    sandbox = virtual(files=FILES, limits=VirtualLimits(wall_time=10))
    await review(sandbox)

    fork = (await sandbox.fork())[0]
    change = await fork.exec(
        "cp -r app before; "
        "sed -i \"s/^PASSWORD = .*/PASSWORD = os.environ['MAIL_PASSWORD']/\" app/mail.py; "
        "sed -i '1i import os' app/mail.py; diff -ru before app; rm -r before"
    )
    print(f"\nthe change, tried on a fork:\n{change.stdout}")
    await sandbox.restore(await fork.snapshot())
    await review(sandbox)

    runaway = await sandbox.exec("while :; do :; done", timeout=0.5)
    print(f"\nendless script: exit code {runaway.exit_code}, {runaway.stderr.strip()}")


if __name__ == "__main__":
    asyncio.run(main())
