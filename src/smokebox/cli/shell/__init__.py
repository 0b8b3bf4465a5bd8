"""Interactive shells: `smokebox sh` and `smokebox demo`."""
