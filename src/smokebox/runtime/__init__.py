"""Commands on a host: starting, supervising and reaping them, and collecting their output."""
