"""Workload files: what is computed, token by token, for every engine alike."""
