"""Show results: one Document, rendered as a page, as Markdown or in a terminal."""
