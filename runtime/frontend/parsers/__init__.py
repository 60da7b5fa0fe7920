"""What a model writes, as reasoning, calls of tools and content: while it is being written."""
