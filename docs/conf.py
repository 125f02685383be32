"""Sphinx settings of the documentation site; `make docs` builds it."""

project = "Baton"
extensions = ["myst_parser"]
myst_heading_anchors = 3  # `page.md#heading`, as on GitHub
highlight_language = "none"
html_theme = "furo"
html_title = "Baton"
