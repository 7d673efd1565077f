"""SFT data: conversations of all common formats, tokenised once and stored on disk."""
