"""Tests of the record of agents' sessions, over each store."""
