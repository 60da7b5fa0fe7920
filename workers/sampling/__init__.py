"""From logits to tokens and logprobs, on the sampler's rank.

A token is a function of its row's logits, parameters, seed and position alone: noise comes from a
counter-based hash, and which rule applies never depends on the other rows.
"""
