"""What a script does before a model is loaded: its inputs are looked at, its memory estimated, its ranks launched."""
