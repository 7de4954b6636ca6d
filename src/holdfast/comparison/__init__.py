"""Which method, for my model and my data? Many recipes, side by side, and a recommendation."""
