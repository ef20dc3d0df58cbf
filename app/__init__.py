"""Hold view code that pages share; the pages are in `pages/`, the numbers come from `featcal`."""
