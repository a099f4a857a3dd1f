"""What `fullshard inspect`, `verify` and `export` do."""
