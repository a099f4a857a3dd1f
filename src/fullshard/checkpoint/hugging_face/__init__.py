"""Hugging Face folders, read into shards by byte ranges, including old names and per-expert tensors."""
