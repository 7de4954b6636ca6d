"""``python -m holdfast``."""

import sys

from holdfast.cli import main

sys.exit(main())
