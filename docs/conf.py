"""The site: Sphinx reads the Markdown of this folder with MyST; ``make docs`` builds it offline."""

from __future__ import annotations

from sartor._version import __version__

project = "Sartor"
copyright = "the contributors of Sartor, Apache-2.0"
release = version = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["__pycache__"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
html_theme = "furo"
html_title = f"Sartor {__version__}"
html_show_sourcelink = False
html_copy_source = False
highlight_language = "text"
smartquotes = False  # quotes in symbol tables are code
