"""Training a causal language model from a config file: `fullshard train CONFIG.yaml`."""
