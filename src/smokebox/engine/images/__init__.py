"""What a sandbox starts from: a stack of read-only layers and a configuration."""
