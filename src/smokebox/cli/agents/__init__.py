"""Commands that run agents, and the views of their work."""
