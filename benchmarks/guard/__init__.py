"""Is the engine as fast as it was? Beside a fixed computation, in the same run."""
