"""Query a knowledge base, which is a bucket of smokebox.toml.

Here the bucket is a folder, so that this runs anywhere; `bucket = "my-knowledge-base"` is on S3.
"""

import shutil
from pathlib import Path

from smokebox.sync import AgentClient
from smokebox.testing import serve_project

project, articles = Path("support").absolute(), Path("articles").absolute()
shutil.copytree(Path(__file__).parent, project)
(articles / "billing").mkdir(parents=True)
(articles / "billing" / "refunds.md").write_text("A refund takes five days.\n")
(project / "smokebox.toml").write_text(
    f'[buckets.KNOWLEDGE_BASE]\nurl = "{articles.as_uri()}"\nread_only = true\n'
)

with serve_project(project) as url, AgentClient(url) as client:
    print(client.ask("support", "ada", "How long does a refund take?").result, end="")
