"""A bucket mounted in a Linux sandbox, which never sees its credentials.

python examples/mounted_bucket.py
"""

from __future__ import annotations

import asyncio
import os

from smokebox import get_sandbox
from smokebox.testing import SeaweedServer


async def main() -> None:
    """Write a report into a bucket, and read it in another sandbox with a read-only mount."""
    # A real S3 server for this example; pass endpoint= for yours, or omit it for AWS.
    with SeaweedServer() as store:
        # The endpoint and the credentials come from the environment of this process.
        os.environ["AWS_ENDPOINT_URL"] = store.endpoint
        os.environ["AWS_ACCESS_KEY_ID"] = store.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = store.secret_key
        bucket = store.create_bucket("reports")
        writer, reader = get_sandbox("mount-writer"), get_sandbox("mount-reader")
        await writer.mount_bucket(bucket, "/data")
        await writer.exec("mkdir -p /data/june && seq 1000 > /data/june/sales.txt")
        await reader.mount_bucket(bucket, "/data", prefix="june", read_only=True)
        print((await reader.exec("wc -l /data/sales.txt")).stdout.strip())
        print((await reader.exec("echo 1 > /data/sales.txt")).stderr.strip())
        print(
            "secret visible inside:", store.secret_key in (await writer.exec("env; ps aux")).stdout
        )
        for sandbox in (writer, reader):
            await sandbox.unmount_bucket("/data")
            await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
