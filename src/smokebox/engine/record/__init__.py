"""The durable record of what sandboxes there are."""
