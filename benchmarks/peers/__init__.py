"""Other engines on the same work. Their scripts run in their own environments."""
