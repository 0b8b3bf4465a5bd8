"""Senders of requests and their rights: keys, profiles, scopes, peers, limits of requests."""
