"""From a GGUF file to a folder in Hugging Face's layout. Knows nothing of serving."""
