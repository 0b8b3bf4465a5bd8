"""Access to the files of a sandbox from outside, confined to its root."""
