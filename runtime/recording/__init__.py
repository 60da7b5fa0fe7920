"""What an engine did: written to files, read, replayed, drawn."""
