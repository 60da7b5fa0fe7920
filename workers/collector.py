"""Python's garbage collector in a process that runs steps."""

import gc


def freeze_heap() -> None:
    """Keeps the collector from ever walking what is there by now.

    Torch, transformers and a model are hundreds of thousands of objects: walking them takes up to a
    second, and all ranks wait for the one that does. Steps leave little behind.
    """
    gc.collect()
    gc.freeze()
