"""Libraries whose models `fs.shard` takes as they are. None of them is imported here."""

from fullshard import integrations
from fullshard.model_libraries import transformers


def register() -> None:
    integrations.register(transformers.LIBRARY)
