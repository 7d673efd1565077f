"""A client of HTTP services that may fail in every way."""
