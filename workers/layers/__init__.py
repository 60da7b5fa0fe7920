"""What replaces a model's own linears, embedding and attention."""
