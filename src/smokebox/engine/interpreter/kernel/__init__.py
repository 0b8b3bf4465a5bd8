"""The kernel of Python contexts, which is copied into sandboxes and runs there.

It uses only the standard library, and runs on any CPython from 3.8 on: that of the image. Its
modules import each other relatively, as their package has another name there.
"""
