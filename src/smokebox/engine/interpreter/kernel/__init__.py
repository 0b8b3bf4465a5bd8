"""The kernel of Python contexts, which is copied into sandboxes and runs there.

The standard library only, and any CPython from 3.8 on: it is the Python of the image. Its
modules import each other relatively, as their package has another name there.
"""
