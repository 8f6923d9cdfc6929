"""`python -m firstloss` is the same as the command `firstloss`."""

import sys

from firstloss.cli import main

sys.exit(main())
