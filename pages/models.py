"""Show the loaded models and samples, and a form for the user's own; write a report on them."""

from app import shelf, view

tab, places = view.tabs(shelf.TABS, "shelf")
with places[tab]:
    shelf.draw_tab(tab)
