"""Running commands on a host: supervising and reaping them, and collecting their output."""
