"""The command line: ``holdfast SUBCOMMAND``, one module per subcommand."""

from holdfast.cli.main import main

__all__ = ["main"]
