"""``python -m holdfast``, and the command ``holdfast``."""

import os
import sys


def main() -> int:
    """Run the command line; Ctrl-C is one line from the first moment."""
    # Before torch is imported: large tensors in huge pages, with which models run faster on CPUs.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        from holdfast.cli import main

        return main()
    except KeyboardInterrupt:  # while it is imported
        sys.stderr.write("holdfast: stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
