"""Several nodes, on one machine or on as many."""
