"""Code that runs in a sandbox and leaves its state for the code after it."""
