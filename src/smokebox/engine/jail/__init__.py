"""An isolated Linux: make it, spawn into it, reach its files, freeze, kill, adopt."""
