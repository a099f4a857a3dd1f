"""`fullshard inspect`, `verify` and `export`."""
