"""Hugging Face folders: read into shards by byte ranges, old and per-expert names included."""
