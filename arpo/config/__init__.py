"""YAML files and flags become a frozen config. Also: the allowed values, and the folders of runs and models."""
