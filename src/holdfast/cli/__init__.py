"""The command line: ``holdfast SUBCOMMAND``, one file a subcommand."""

from holdfast.cli.main import main

__all__ = ["main"]
