"""The settings of the site: ``make docs`` builds it, and warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import onecopy

project = "onecopy"
author = "The onecopy authors"
copyright = author  # noqa: A001 - the name is Sphinx's
release = onecopy.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "reference_pages",
]
exclude_patterns = ["_build"]
# A public name is described on the API page and on the page of its module. A link to it may lead to either.
suppress_warnings = ["ref.python"]

# The anchors of headings are those of GitHub, so that a link works in both places.
myst_heading_anchors = 4

# Frameworks that only integrations need. The site is built without them.
autodoc_mock_imports = ["lightning", "mmengine", "transformers"]
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries = False

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"onecopy {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False
