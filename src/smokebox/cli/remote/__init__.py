"""What verbs share that talk to a server."""
