"""The parts of `fs.load`."""
