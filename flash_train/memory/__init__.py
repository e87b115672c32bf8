"""How much memory a training step needs, and for what: counted by storages, on real tensors or on fake ones."""
