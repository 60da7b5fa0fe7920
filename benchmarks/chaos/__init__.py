"""What becomes of requests while workers are killed, stopped, slowed down and made to fail."""
