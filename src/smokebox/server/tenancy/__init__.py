"""Who may do what on a server: keys, profiles, ceilings, quotas and peers of local connections."""
