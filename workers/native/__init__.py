"""Kernels in C for CPUs, compiled where they run."""
