"""Run the command line with `python -m tokenspeed_core.cli`."""

import sys

# `-m` puts the working directory first on sys.path; a file there must not replace an installed module.
if not sys.flags.safe_path:
    del sys.path[0]

from tokenspeed_core.cli.app import main

sys.exit(main())
