"""Files of requests, answered offline, in OpenAI's batch format; resumable at any moment."""
