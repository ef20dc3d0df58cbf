"""Draw the eight picture tasks of the ``clip-mini`` suite at run time.

Nothing is stored but a small atlas (``data/clip-mini/glyphs.npz``); every picture is drawn with numpy from a
frozen random stream, so a pool is the same on every run. Pools of different splits come from different
streams and never share a picture. Handwritten digits are a finite set, so their scans are divided between the
splits first, class by class, and no scan appears in two splits; within a split a scan may be drawn several
times, each time placed, inked and lit anew.

Digits: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, doi:10.24432/C50P49, licence CC BY 4.0 (the 1797 scans that scikit-learn redistributes). Letters:
the built-in font of Pillow (Aileron, CC0).
"""

from featcal.samples.embedded_pictures.names import CLASSES, TEMPLATES
from featcal.samples.embedded_pictures.pool import SPLITS, draw_pictures, render

__all__ = ["CLASSES", "SPLITS", "TEMPLATES", "draw_pictures", "render"]
