"""Using an HTTP service that fails in every way."""
