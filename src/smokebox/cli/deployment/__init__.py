"""Packages of a project, and the files of platforms that run it."""
