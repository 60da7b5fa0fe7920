"""Models of the transformers library, built without weights and cut into shards."""
