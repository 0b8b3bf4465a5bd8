"""Long-running processes of a sandbox, and their logs."""
