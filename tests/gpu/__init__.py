"""What needs a GPU to be seen: `python -m tests.gpu`.

It needs torch, transformers and triton alone.
"""
