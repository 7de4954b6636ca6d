"""Show results: one Document, rendered as a page, as Markdown or in a terminal."""

#: Share of the best gain that the model to take has at least. The command line needs it at once.
LEARN_AT_LEAST = 0.95
