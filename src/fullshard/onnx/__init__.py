"""ONNX files from live models and from checkpoints."""
