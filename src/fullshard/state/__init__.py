"""Values outside a step: state dicts, copies, materialisation of meta-device models."""
