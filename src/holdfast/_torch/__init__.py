"""Small helpers around tensors, modules and batches. Imports nothing else of holdfast."""
