"""Tests of agents. A package, so that file names may repeat in other directories."""
