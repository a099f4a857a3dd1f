"""The parts of `fs.save`."""
