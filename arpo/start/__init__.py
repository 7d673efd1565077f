"""The steps of a script before a model is loaded: check inputs, memory and ranks. A script that cannot go on ends
here."""
