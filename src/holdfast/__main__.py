"""``python -m holdfast``, and the command ``holdfast``."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C is one line from the first moment."""
    try:
        from holdfast.cli import main

        return main()
    except KeyboardInterrupt:  # while it is imported
        sys.stderr.write("holdfast: stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
