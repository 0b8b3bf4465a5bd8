"""What the verbs that have an agent work share."""
