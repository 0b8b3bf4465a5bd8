"""Rights over sandboxes: ceilings and quotas of tenants, and the handlers that they may name."""
