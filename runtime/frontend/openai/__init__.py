"""What clients of OpenAI's API know, over the same text and chat code as gRPC."""
