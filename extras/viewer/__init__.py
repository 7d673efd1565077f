"""The trajectory viewer, which turns a dump into one static page."""
