"""One pass over the data at the pretrained weights, and its cache; drawing texts and KL."""
