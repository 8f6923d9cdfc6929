"""`python -m firstloss`: the same as the command `firstloss`."""

import sys

from firstloss.cli import main

sys.exit(main())
