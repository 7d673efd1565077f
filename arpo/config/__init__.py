"""YAML files and flags become a frozen config; what its values may be; the folders of runs and models."""
