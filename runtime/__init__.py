"""The driver: engine, scheduler, executor, cluster, frontends. Knows no torch."""
