"""The offline demo: worlds, data, a tiny model, the report."""
