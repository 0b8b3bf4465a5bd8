"""Tests of the model-facing tools, over each sandbox."""
