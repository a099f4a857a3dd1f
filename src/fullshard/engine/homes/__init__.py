"""Where values rest: on the compute device, in host memory, on disk."""
