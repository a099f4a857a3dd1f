"""The format on disk: headers, values, checksums, the manifest. See docs/checkpoint-format.md."""
