"""Requests that come at times of their own, to a server."""
