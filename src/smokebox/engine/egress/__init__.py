"""The egress proxy of Linux sandboxes: policy enforcement, TLS, DNS, tunnels and the audit log."""
