"""Show the loaded models and samples, the form for your own, and write a report on them."""

from app import shelf, view

tab, places = view.tabs(shelf.TABS, "shelf")
with places[tab]:
    shelf.draw_tab(tab)
