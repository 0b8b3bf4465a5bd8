"""Tests of event logs and their stores."""
