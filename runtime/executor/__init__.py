"""Runs step plans on a group of ranks."""
