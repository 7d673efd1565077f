"""SFT data: conversations of every style, tokenised once, on disk."""
