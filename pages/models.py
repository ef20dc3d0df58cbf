"""Show what is loaded, the way to one's own models and data, and write a report on them."""

from app import shelf, view

tab, places = view.tabs(shelf.TABS, "shelf")
with places[tab]:
    shelf.draw_tab(tab)
