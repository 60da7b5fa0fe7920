"""Attention over the paged KV cache: one protocol, a backend a file."""
