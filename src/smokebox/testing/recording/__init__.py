"""Traffic with real providers of models, kept in a file and given back without them."""
