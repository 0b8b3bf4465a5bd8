"""Routes of an app, one module per resource."""
