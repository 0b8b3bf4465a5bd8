"""Fake model providers: `server` has the HTTP server, the others the providers' APIs."""
