"""Code execution in a sandbox: contexts keep their state between executions."""
