"""Disk limits that the kernel enforces: project quotas, and a file system that has them."""
