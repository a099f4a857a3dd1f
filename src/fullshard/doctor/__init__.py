"""Is a training right? A script, or a function, runs a few steps beside an unsharded copy of its model."""
