"""`python -m tokenspeed_testing DISTRIBUTION`: its verdicts, a JSON object a line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from tokenspeed_testing.report import verdicts

if __name__ == "__main__":
    for verdict in verdicts(sys.argv[1]):
        print(json.dumps(asdict(verdict)), flush=True)
