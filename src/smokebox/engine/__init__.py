"""Linux sandboxes by stable id on one host: the owner of each, and the jail it lives in.

Import what is needed from the modules: the processes that jails are made of import from
here too, and stay small.
"""
