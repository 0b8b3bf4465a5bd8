"""`python -m smokebox` is the `smokebox` command."""

import sys

from smokebox.cli import main

sys.exit(main())
