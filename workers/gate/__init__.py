"""Whether a model of a class that no test knows gives what transformers gives: the gate.

A shrunk copy with random weights runs on our attention and our shards, in a process of its own.
"""
