"""The weights of a checkpoint, wherever they lie, read a slice at a time."""
