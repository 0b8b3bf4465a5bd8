"""The durable record of all sandboxes."""
