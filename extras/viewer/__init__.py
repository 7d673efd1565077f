"""The trajectory viewer turns a dump into one static page."""
