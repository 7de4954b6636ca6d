"""The loops that train: a short one of our own, and those people use."""
