"""The interactive shell behind `smokebox sh`."""
