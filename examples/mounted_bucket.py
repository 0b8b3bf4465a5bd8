"""A bucket as a directory of a Linux sandbox, which never sees the credentials for it.

python examples/mounted_bucket.py
"""

from __future__ import annotations

import asyncio
import os

from smokebox import get_sandbox
from smokebox.testing import SeaweedServer


async def main() -> None:
    """Write a report into a bucket, and read it in another sandbox, which may only read."""
    # A real S3 server for this example; yours is named by endpoint=, or is S3 itself.
    with SeaweedServer() as store:
        # Where the bucket is, and what opens it: taken from the environment of this process.
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
        print("secret inside:", store.secret_key in (await writer.exec("env; ps aux")).stdout)
        for sandbox in (writer, reader):
            await sandbox.unmount_bucket("/data")
            await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
