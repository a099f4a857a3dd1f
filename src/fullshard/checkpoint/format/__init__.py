"""The format on disk: headers, values, checksums and the manifest. See docs/checkpoint-format.md."""
