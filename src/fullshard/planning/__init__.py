"""What training a model needs on one rank: `fullshard plan`."""
