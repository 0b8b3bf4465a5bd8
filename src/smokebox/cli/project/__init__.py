"""What the verbs of a project have in common."""
