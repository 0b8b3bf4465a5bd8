"""Images, from which sandboxes start: stacks of read-only layers with a configuration."""
