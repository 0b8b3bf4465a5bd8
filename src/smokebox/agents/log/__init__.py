"""Event logs of sessions: append-only, with one fenced writer per session."""
