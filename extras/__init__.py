"""What the package does not know: used through NAME or FILE.py:NAME, or run by itself."""
