"""A trajectory dump as one static page."""
