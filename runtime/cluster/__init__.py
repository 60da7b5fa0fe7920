"""Where the ranks run: launching them, loading the model, learning of their death."""
