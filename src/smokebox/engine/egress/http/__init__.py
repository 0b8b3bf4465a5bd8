"""HTTP of the egress proxy: strict parsing, handlers, forwarding and responses."""
