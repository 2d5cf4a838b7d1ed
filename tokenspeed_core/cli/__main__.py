"""`python -m tokenspeed_core.cli` is `tokenspeed`."""

import sys

if not sys.flags.safe_path:
    del sys.path[
        0
    ]  # the working directory, which `-m` puts first: nothing is loaded from where a user stands

from tokenspeed_core.cli.app import main

sys.exit(main())
