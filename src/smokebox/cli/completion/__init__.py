"""What a shell offers while somebody types a command line."""
