"""Build the site: `make docs`. Nothing is fetched, every example is run, every warning is an error."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "extensions"), str(DOCS.parent)]

# Before torch is imported: what runs here is tiny, and nothing of the user's may be read or counted.
_cache = tempfile.TemporaryDirectory(prefix="featcal-docs-")
os.environ |= {"HF_HUB_OFFLINE": "1", "FEATCAL_CACHE": _cache.name, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
# Of what libraries say to each other nothing is shown: it has paths of this machine in it.
warnings.filterwarnings("ignore", category=FutureWarning)

from marked import take_turns  # noqa: E402

import featcal  # noqa: E402

project = "featcal"
author = "The featcal authors"
copyright = "the featcal authors, Apache-2.0"
version = release = featcal.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "executed",
    "generated",
    "mathml",
    "outside",
    "plotly_figures",
]
exclude_patterns = [
    "extensions",
    "gallery",
    "templates",
    "examples/*.ipynb",
    "examples/*.py",
]
templates_path = ["templates"]
smartquotes = False  # `--` begins an option

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autosummary_generate = True
default_role = "py:obj"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": "|".join(take_turns([file.name for file in (DOCS / "gallery").glob("plot_*.py")])),
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("plotly_figures.scrape",),
    "reset_modules": (),
    "default_thumb_file": str(DOCS.parent / "app" / "mark.svg"),
    "remove_config_comments": True,
    "show_memory": False,
    "min_reported_time": 10_000,  # seconds of one machine say little
    "write_computation_times": False,  # nor does their page, which loads scripts from elsewhere
    "abort_on_example_error": True,
    "capture_repr": ("_repr_html_", "__repr__"),
    "nested_sections": False,
}

html_context = {"default_mode": "auto"}
html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "featcal"
html_favicon = "../app/mark.svg"
html_static_path = ["static", "images/before-after-light.svg", "images/before-after-dark.svg"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"**": ["whole-tree.html"]}
html_theme_options = {
    "logo": {"text": "featcal", "image_light": "../app/mark.svg", "image_dark": "../app/mark.svg"},
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_depth": 3,
    "show_prev_next": True,
}
copybutton_selector = "div:not(.output) > div.highlight > pre"
