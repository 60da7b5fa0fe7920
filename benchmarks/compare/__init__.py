"""Engines on the same work, run by run in turn."""
