"""Snapshots of whole sandboxes: immutable stacks of layers, and sandboxes that start from them."""
