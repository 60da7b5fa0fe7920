"""What the driver costs a device: the share of time in which rank 0 has no step to run."""
