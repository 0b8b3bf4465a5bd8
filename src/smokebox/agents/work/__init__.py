"""Units of work of a session: prompts, shell commands, tasks and compactions."""
