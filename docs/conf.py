"""Sphinx: English sources, Simplified Chinese through the gettext catalogues under `locales/`."""

from __future__ import annotations

import os
from pathlib import Path

project = "Magi"
author = "the Magi authors"
copyright = "the Magi authors, Apache-2.0"
release = version = (Path(__file__).resolve().parent.parent / "VERSION").read_text().strip()

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]

language = os.environ.get("DOCS_LANGUAGE", "en")
locale_dirs = ["locales"]
gettext_compact = False
gettext_uuid = False
gettext_location = False  # catalogues change when the text does, not when lines move

html_theme = "pydata_sphinx_theme"
html_title = f"Magi {version}"
html_static_path = ["_static"]
html_css_files = ["magi.css"]
html_context = {"languages": [("en", "English"), ("zh_CN", "简体中文")]}
html_theme_options = {
    "navbar_end": ["language-switcher", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"**": []}
