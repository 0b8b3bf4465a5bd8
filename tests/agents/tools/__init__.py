"""Tests of the tools of models, in each sandbox."""
