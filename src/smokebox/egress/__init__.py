"""What may leave a sandbox, and what happens to it on the way: policy and handlers.

The door that holds to them is the engine's, or the virtual sandbox's own.
"""
