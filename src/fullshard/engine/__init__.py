"""One training step: gather, compute, release, reduce, hand out gradients."""
