"""The door by which requests leave a sandbox: there is no other way out."""
