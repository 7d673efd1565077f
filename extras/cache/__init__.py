"""The command line of the cache of tool results, and the format of the released cache."""
