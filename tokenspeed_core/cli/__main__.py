"""`python -m tokenspeed_core.cli` is `tokenspeed`."""

import sys

from tokenspeed_core.cli.app import main

sys.exit(main())
