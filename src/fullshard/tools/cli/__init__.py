"""The command line: `fullshard COMMAND ...`, one module per group of commands."""

from fullshard.tools.cli.start import main

__all__ = ["main"]
