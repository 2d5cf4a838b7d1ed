"""The hook that records steps for `bench serve --profile`.

An engine builds a record for each step as soon as one hook observes steps. The hook therefore
exists only if the environment names the recorder's folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed_bench.recorder import VARIABLE, Recorder
from tokenspeed_core.api import hookimpl

if VARIABLE in os.environ:
    observe_step = hookimpl(Recorder(Path(os.environ[VARIABLE])).observer())
