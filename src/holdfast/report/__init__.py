"""A report for people: its verdict in words, Markdown, a terminal's table, a page."""
