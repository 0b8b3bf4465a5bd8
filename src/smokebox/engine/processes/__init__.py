"""Background processes of a sandbox, and their logs."""
