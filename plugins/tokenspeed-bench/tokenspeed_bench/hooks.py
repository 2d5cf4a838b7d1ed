"""The hooks of tokenspeed-bench: the recorder of a server that `bench serve --profile` started, in all others nothing.

An engine makes a record of each step where anybody observes them, so nobody does whom the environment does not name.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed_bench.recorder import VARIABLE, Recorder
from tokenspeed_core.api import hookimpl

if VARIABLE in os.environ:
    observe_step = hookimpl(Recorder(Path(os.environ[VARIABLE])).observer())
