"""What sampling costs a step, without a model."""
