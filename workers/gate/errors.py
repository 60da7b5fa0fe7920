"""What the gate itself raises."""

from workers.errors import ModelError


class NoReference(ModelError):
    """Transformers itself can't make or run a small copy: there is nothing to compare with."""
