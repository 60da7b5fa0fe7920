"""One rank of a model: a gRPC port before it, a device behind it. Knows no driver."""
