"""What a server is like after long mixed traffic."""
