"""Shell sessions, which keep their state between commands."""
