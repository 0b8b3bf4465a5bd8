"""Commands that create and serve a project."""
