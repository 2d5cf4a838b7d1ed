"""A captured step: its buffers and graphs, and the result of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenspeed_core.api.step import I64
from tokenspeed_core.worker.draft_graphs import FollowGraphs
from tokenspeed_core.worker.drafts import DraftRows
from tokenspeed_core.worker.inputs import Columns, GroupInputs, StepBuffers
from tokenspeed_core.worker.padding import SharedPadding
from tokenspeed_core.worker.sampler import SamplingRows
from tokenspeed_core.worker.staged import StagedLayout

Follow = Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor | None]
"""Runs a draft model after a step. Its arguments are those of `DraftRunner.follow` after the step, as is its result."""


@dataclass(slots=True, eq=False)
class Bucket:
    """A captured step: its part of the upload, its inputs (views of shared buffers), and its graphs.

    `slots` are those of its rows of logits, int64 [R]. `drafts` are its rows with draft tokens, with as many sampled
    tokens as `num_new` says; `ids` and `num_new` are then parts of `verified`. `launches` caches launches by their rows,
    because the steps of few users often repeat. `own_logits` and `own_states` (those that a draft model reads) are the
    forward's output while the graphs that read it are captured. `follow` are the graphs of the draft model, if there is
    one. `no_shared_prefix` is the variant for short decodes without a shared prefix, if there is one. `padding` is set
    if several engines execute the step together.
    """

    layout: StagedLayout
    staged: torch.Tensor
    columns: Columns
    buffers: StepBuffers
    inputs: tuple[GroupInputs, ...]
    slots: torch.Tensor
    ids: torch.Tensor
    num_new: torch.Tensor
    verified: torch.Tensor
    drafts: DraftRows | None = None
    launches: dict[bytes, GraphLaunch] = field(default_factory=dict)
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    own_logits: torch.Tensor = field(init=False)
    own_states: torch.Tensor | None = None
    kept_logits: torch.Tensor = field(init=False)
    keep_graph: torch.cuda.CUDAGraph = field(init=False)
    draw_graph: torch.cuda.CUDAGraph = field(init=False)
    follow: FollowGraphs | None = None
    no_shared_prefix: Bucket | None = None
    padding: SharedPadding | None = None

    def logits(self) -> torch.Tensor:
        """Return the logits of this bucket's last launch, if no other step was launched since."""
        self.keep_graph.replay()
        return self.kept_logits

    def draw(self) -> None:
        """Replace the greedy tokens of this bucket's last launch, if no other step was launched since."""
        self.keep_graph.replay()
        self.draw_graph.replay()


@dataclass(frozen=True, slots=True, eq=False)
class GraphLaunch:
    """A launched step. `ids` int32 [rows of the bucket] are greedy until `draw` is called; `logits` returns the logits.

    `at` are the indices of the R sampling rows among them, None if they are the first. With draft tokens, `num_new`
    int32 is the number of new tokens of each row of the plan, and `verified` holds it and `ids`. All tensors are views
    of buffers that the next step overwrites (later on the stream). Until then `draw` or `logits` may be called, once.
    After `logits` were changed in place, `choose_again` replaces `ids`; its argument says whether a row draws. `follow`
    runs a draft model after the step.
    """

    rows: SamplingRows
    ids: torch.Tensor
    at: I64 | None
    logits: Callable[[], torch.Tensor]
    draw: Callable[[], None]
    choose_again: Callable[[bool], None]
    num_new: torch.Tensor | None = None
    verified: torch.Tensor | None = None
    follow: Follow | None = None
