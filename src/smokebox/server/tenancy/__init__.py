"""Rights on a server: keys, profiles, ceilings, quotas and peers of local connections."""
