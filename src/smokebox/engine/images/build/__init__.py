"""Builds of Dockerfiles: plans, contexts and their execution in sandboxes, without a daemon."""
