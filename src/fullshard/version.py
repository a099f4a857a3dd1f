"""The version of the package: what it says of itself, and what checkpoints say wrote them."""

VERSION = "0.1.0"
