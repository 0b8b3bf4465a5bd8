"""Previews: what listens in a sandbox, for browsers and others outside.

They are taken from the listeners of the server as they come, before it looks at them: `front`
tells them from requests to the API, `visitor` talks to who is outside, `upstream` to the
sandbox, `gate` says who may, and `sites` by which names.
"""
