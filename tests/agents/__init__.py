"""Tests of agents, a package so that file names need to differ only within a directory."""
