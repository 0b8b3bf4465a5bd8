"""Modules that several rooms share and no library provides."""
