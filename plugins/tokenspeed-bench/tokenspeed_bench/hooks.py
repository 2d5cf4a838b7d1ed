"""The hooks of tokenspeed-bench: the recorder of a server that `bench serve --profile` started, in all others nothing.

An engine makes a record of each step as soon as one hook observes them. So there is a hook only where the environment
names the recorder's folder, and every other engine steps as if this module were not installed.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed_bench.recorder import VARIABLE, Recorder
from tokenspeed_core.api import hookimpl

if VARIABLE in os.environ:
    observe_step = hookimpl(Recorder(Path(os.environ[VARIABLE])).observer())
