"""Measure what a fine-tune cost: drift, divergence, scores before and after, and the report."""
