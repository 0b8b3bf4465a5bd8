"""The durable record of conversations: append-only, one fenced writer per session."""
