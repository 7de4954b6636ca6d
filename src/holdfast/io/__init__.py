"""Files and models: rows, checkpoints, model loading, storage."""
