"""Who runs, how many tokens, in which blocks. Pure: no torch, no clock, no I/O."""
