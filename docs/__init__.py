"""The documentation: pages in Markdown, and the generator of those that come from the code."""
