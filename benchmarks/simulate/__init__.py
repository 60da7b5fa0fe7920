"""The real scheduler and engine against simulated workers, in virtual time."""
