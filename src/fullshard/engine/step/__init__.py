"""An optimizer's step on shards: in place, chunk by chunk, or on entire tensors."""
