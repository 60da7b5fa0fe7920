"""How ranks exchange tensors: over the network or a GPU's links, or through a host's memory."""
