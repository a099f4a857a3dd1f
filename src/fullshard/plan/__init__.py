"""From a model to a plan: units, layout, aliases, schedule. Pure: no tensor memory, no ranks."""
