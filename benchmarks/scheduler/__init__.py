"""What a step costs the driver's scheduling, without a model."""
