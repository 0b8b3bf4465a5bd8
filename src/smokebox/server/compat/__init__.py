"""APIs of other sandbox services, served by the same engine."""
