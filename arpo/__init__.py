"""ARPO-torch: agentic RL for LLMs in pure PyTorch (ARPO, arXiv 2507.19849; AEPO, arXiv 2510.14545)."""
