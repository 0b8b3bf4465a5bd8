"""The files of a sandbox, reached from outside, below its root and nowhere else."""
