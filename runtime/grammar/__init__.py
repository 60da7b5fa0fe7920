"""Structured output, on the driver's side: what a request may say next, as masks over token ids."""
