"""`python -m tokenspeed_testing DISTRIBUTION [LIBRARY]` runs all checks and prints one JSON object per line.

With the library "transformers", model families are compared with it.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict

from tokenspeed_testing.report import run_checks

if __name__ == "__main__":
    for verdict in run_checks(*sys.argv[1:3]):
        print(json.dumps(asdict(verdict)), flush=True)
    gc.freeze()  # or Python searches all objects of torch for garbage at the end
