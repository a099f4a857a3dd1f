"""Checkpoints: plain safetensors, any number of ranks, verified. See docs/checkpoint-format.md."""
