"""The command line: `fullshard COMMAND ...`, one module for each group of commands."""

from fullshard.tools.cli.start import main

__all__ = ["main"]
