"""The runner of one process: executes step plans on the CPU or a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from traceback import walk_tb

import numpy as np
import torch

from tokenspeed_core.api.step import (
    I32,
    LateInputs,
    OutOfMemory,
    StepFailed,
    StepPlan,
    StepResult,
    StepSize,
)
from tokenspeed_core.kernels.error_attribution import attribute_error
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.worker.assemble import Assembly
from tokenspeed_core.worker.attention import bind_arena
from tokenspeed_core.worker.captured_stages import GraphContext
from tokenspeed_core.worker.captured_step import Bucket
from tokenspeed_core.worker.draft_model import DraftRunner, TargetStep
from tokenspeed_core.worker.draft_passes import DraftContext
from tokenspeed_core.worker.expert_balancer import ExpertBalancer
from tokenspeed_core.worker.graphs import StepGraphs
from tokenspeed_core.worker.inputs import EagerInputs, StepInputs
from tokenspeed_core.worker.launched import LaunchedStep
from tokenspeed_core.worker.masks import CudaMasks, HostMasks, Masks
from tokenspeed_core.worker.prompt_scores import query_tokens, score_prompt
from tokenspeed_core.worker.sampler import Sampler, SamplingRows, places_of
from tokenspeed_core.worker.slots import (
    DRAWS,
    SPECIAL,
    SlotFlags,
    SlotLayout,
    SlotState,
    check_supported,
    max_num_blocks,
)
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_core.worker.transfer import CudaTransfer, HostDeviceTransfer, HostTransfer


class LocalRunner:
    """A `Runner` on one device. All methods are called from one thread at a time.

    On the CPU, `forward` and `sample` compute before they return. On CUDA they only launch.
    """

    def __init__(self, assembly: Assembly, num_pages: int) -> None:
        """Allocate slots and an arena of `num_pages`, and one more for padding. Weights are loaded separately."""
        self._assembly = assembly
        self.resolved = assembly.resolved
        self._device = assembly.build.device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the weights were copied on another stream
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._use_stream()
        self._launched: dict[int, LaunchedStep] = {}
        self._nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
        self.block_size = assembly.block_size
        self.layout = assembly.pool.layout
        self.num_pages = 0
        self._model = assembly.model
        self._token_counts = assembly.build.token_counts
        self._groups = tuple(assembly.build.groups.values())
        self._transfer: HostDeviceTransfer = (
            HostTransfer() if self._stream is None else CudaTransfer(self._stream)
        )
        limits = self.resolved.limits
        mask_shape = (limits.max_sampled, -(-limits.vocab_size // 32))
        self._masks: Masks = (
            HostMasks(mask_shape) if self._stream is None else CudaMasks(self._stream, mask_shape)
        )
        self._flags = SlotFlags(limits.max_num_seqs + 1, len(self._groups), self.block_size)
        layout = SlotLayout(
            limits.max_num_seqs + 1,
            max_num_blocks(limits.max_model_len, self.block_size),
            len(self._groups),
            limits.max_drafts,
        )
        self._state = SlotState(layout, self._device)
        split = tuple(group.is_split for group in self._groups)
        self._inputs = EagerInputs(
            self._state, assembly.kernels, self.block_size, split, self._transfer
        )
        self._sampler = self._new_sampler()
        self._drafter = self._new_drafter()
        self._graphs: StepGraphs | None = None
        self._num_engines = self.resolved.parallel.group("data").size
        self._shared_bucket: Bucket | None = None  # for the next step of all engines
        self._balancer: ExpertBalancer | None = None
        self.resize(num_pages)

    @property
    def kernel_plan(self) -> KernelPlan:
        """Every kernel decision, with its reasons."""
        return self._assembly.selector.plan()

    def resize(self, num_pages: int) -> None:
        """Replace the arena by an empty one and forget all slots. Nothing may be in flight."""
        self._free_arena()
        self._use_stream()
        self._arena = _empty_arena(num_pages + 1, self.layout.page_bytes, self._device)
        build = self._assembly.build
        bind_arena(build.cached_layers, self._arena, self.layout, build.kv_dtype)
        self.num_pages = num_pages
        self._padding = [num_pages * each for each in self.layout.blocks_per_page]
        if self._drafter is not None:
            self._drafter.padding = self._padding
        self.forget()

    def capture(self, sizes: Sequence[BucketSize], progress: Callable[[int, int], None]) -> None:
        """Capture steps of these sizes as CUDA graphs. Nothing may be in flight."""
        gc.collect()
        with torch.inference_mode():
            self._use_stream()
            self._token_counts.begin(None)
            context = GraphContext(
                state=self._state,
                flags=self._flags,
                groups=self._groups,
                model=self._model,
                drafter=self._drafter,
                kernels=self._assembly.kernels,
                transfer=self._transfer,
                token_counts=self._token_counts,
                num_engines=self._num_engines,
                block_size=self.block_size,
                max_model_len=self.resolved.limits.max_model_len,
                max_drafts=self.resolved.limits.max_drafts,
            )
            graphs = StepGraphs(context, sizes)
            try:
                graphs.capture(progress)
            except BaseException:
                graphs.release()  # else the traceback may keep them beyond the end of the communication
                raise
        self._graphs = graphs

    def forget(self) -> None:
        """Reset all slots. Nothing may be in flight."""
        self._launched.clear()
        if self._graphs is not None:
            self._graphs.invalidate()
        with torch.inference_mode():
            self._use_stream()
            self._state.reset(self._padding)
        self._flags.reset()
        self._sampler = self._new_sampler()

    def balance_experts(self, balancer: ExpertBalancer) -> None:
        """Move experts between processes from the next step on."""
        balancer.start()
        self._balancer = balancer

    def mask_buffer(self) -> I32:
        """Return memory for the largest `LateInputs.mask`, int32 [S, W], that is copied to the device fastest."""
        return self._masks.buffer()

    def step_size(self, plan: StepPlan) -> StepSize:
        """Return the size of this engine's next step, for `choose_shared_step`."""
        num_decodes = plan.num_decodes
        return StepSize(
            num_decodes,
            plan.num_draft_tokens,
            plan.num_rows - num_decodes,
            len(plan.token_ids),
            plan.prompt_targets is not None or not plan.wants_logits[:num_decodes].all(),
            self._flags.no_shared_prefix(plan),
        )

    def choose_shared_step(self, sizes: Sequence[StepSize]) -> bool:
        """Choose how the engines that share experts execute the next step, from the sizes of all of them.

        All engines choose the same. Return whether the step is captured. An engine without requests then needs no padding
        row in its plan.
        """
        self._shared_bucket = None if self._graphs is None else self._graphs.find_shared(sizes)
        is_captured = self._shared_bucket is not None
        self._token_counts.begin(None if is_captured else tuple(each.num_tokens for each in sizes))
        return is_captured

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step. Raises StepFailed."""
        try:
            check_supported(plan)
            with torch.inference_mode():
                self._use_stream()
                self._launched[plan.step_id] = self._forward(plan)
        # Whatever a kernel or the device raises ends only this step.
        except (Exception, SystemExit) as error:
            raise self._failed(plan.step_id, "forward", error) from error

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step that was launched last. Raises StepFailed."""
        step = self._launched[step_id]
        try:
            with torch.inference_mode():
                self._use_stream()
                if step.rows is None:
                    # An empty copy, so that `collect` waits for the forward.
                    step.fetch_to_host(self._transfer, self._nothing)
                    ids = None
                else:
                    ids = self._sample(step, step.rows, late)
                # The host collects the step while the device drafts.
                made = self._follow(step, ids)
                if made is not None:
                    step.drafts = self._transfer.fetch((made,))
        except (Exception, SystemExit) as error:  # as in forward
            del self._launched[step_id]
            raise self._failed(step_id, "sampling", error) from error

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step. A token of -1 means that its row had no finite logit. Raises StepFailed."""
        step = self._launched.pop(step_id)
        try:
            arrays = step.wait()
        except (Exception, SystemExit) as error:  # as in forward
            raise self._failed(step_id, "execution", error) from error
        return step.result(arrays)

    def close(self) -> None:
        """Wait for the device and free the arena. Safe to call twice."""
        if self._stream is not None:
            self._stream.synchronize()
        self._launched.clear()
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
        self._free_arena()
        if self._stream is not None:
            # Otherwise the next engine's weights could occupy part of the arena's block and pin all of it.
            torch.cuda.empty_cache()

    def _free_arena(self) -> None:
        self._arena = torch.zeros(0, dtype=torch.uint8)
        for layer in self._assembly.build.cached_layers:
            layer.caches = ()

    def _failed(self, step_id: int, what: str, error: BaseException) -> StepFailed:
        kernel = attribute_error(error, self._assembly.build.bound_kernels())
        message = f"step {step_id}: {what} failed: {type(error).__name__}: {error}"
        if kernel:
            message = f"{message}. {kernel}"
        message += self._attribute_to_draft_model(error)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        return OutOfMemory(message) if is_memory else StepFailed(message)

    def _attribute_to_draft_model(self, error: BaseException) -> str:
        """Return which drafter's model raised an exception, "" if none did."""
        choice, wanted = self.resolved.drafter, self.resolved.config.speculation()
        raised_in = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        if choice is None or wanted is None or LocalRunner._follow.__code__ not in raised_in:
            return ""
        return f". Raised while the draft model of {choice.entry} ran; remove {wanted.flag} to run without it"

    def _new_sampler(self) -> Sampler:
        vocab_size, kernels = self.resolved.limits.vocab_size, self._assembly.kernels
        return Sampler(
            self._state,
            self._flags,
            vocab_size,
            kernels,
            self._transfer,
            self._masks,
            self._assembly.processors,
        )

    def _new_drafter(self) -> DraftRunner | None:
        """Return the runner of the draft model, if there is one."""
        assembly, info = self._assembly, self.resolved.draft_model
        if assembly.draft_model is None or info is None:
            return None
        used = set(self.resolved.draft_groups.values())
        context = DraftContext(
            state=self._state,
            groups=[
                (index, group)
                for index, group in enumerate(self._groups)
                if group.spec.name in used
            ],
            kernels=assembly.kernels,
            block_size=self.block_size,
            max_model_len=self.resolved.limits.max_model_len,
            vocab_size=self.resolved.limits.vocab_size,
        )
        return DraftRunner(info, assembly.draft_model, context, self._flags, self._transfer)

    def _use_stream(self) -> None:
        """Make the runner's stream the current one of this thread; cheaper than a context manager."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _forward(self, plan: StepPlan) -> LaunchedStep:
        if plan.slot_inits is not None:
            self._sampler.begin(plan.slot_inits)
        if self._graphs is not None:  # only graphs ask for shared prefixes
            self._flags.note_blocks(plan.block_deltas)
        shared_bucket, self._shared_bucket = self._shared_bucket, None
        if plan.num_rows == 0 and shared_bucket is None:
            return LaunchedStep(plan, None, None)
        if self._balancer is not None:
            self._balancer.begin_step()
        if self._graphs is not None:
            bucket = shared_bucket if self._num_engines > 1 else self._graphs.find(plan)
            if bucket is not None:
                graph = self._graphs.run(bucket, plan)
                return LaunchedStep(
                    plan, None, graph.rows if len(graph.rows.plan_rows) else None, graph
                )
            self._graphs.invalidate()
        inputs = self._inputs.make(plan)
        for group, group_inputs in zip(self._groups, inputs.groups, strict=True):
            group.begin(group_inputs)
        rows, targets = inputs.rows, plan.prompt_targets
        wanted, place, token_ids = inputs.rows.last, self._nothing, self._nothing
        if targets is not None:
            assert wanted is not None, "a scored token is not the last of its row"
            place, token_ids = self._transfer.send(
                (query_tokens(plan, targets), targets.token_ids.astype(np.int64))
            )
            wanted = torch.cat((wanted, place))
        hidden, target = self._run_model(plan, inputs, wanted)
        num_rows, prompt = len(rows.plan_rows), None
        if targets is not None:
            prompt = score_prompt(
                self._model.logits,
                hidden[num_rows:],
                token_ids,
                targets.width,
                self.resolved.limits.vocab_size,
            )
            hidden = hidden[:num_rows]
        if not num_rows:
            return LaunchedStep(plan, None, None, prompt=prompt, target=target)
        return LaunchedStep(plan, self._model.logits(hidden), rows, prompt=prompt, target=target)

    def _run_model(
        self, plan: StepPlan, inputs: StepInputs, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, TargetStep | None]:
        """Return the hidden states of `wanted`, and the step for the draft model if it runs."""
        if plan.next_drafts is None or self._drafter is None:
            hidden = self._model.forward(inputs.token_ids, inputs.positions, wanted)
            return hidden, None
        hidden, states = self._drafter.read(self._model, inputs.token_ids, inputs.positions, wanted)
        return hidden, TargetStep(plan, plan.next_drafts, inputs, states)

    def _follow(self, step: LaunchedStep, ids: torch.Tensor | None) -> torch.Tensor | None:
        """Run the draft model after a step, if there is one. Returns the draft tokens if the host needs them."""
        graph, target, step.target = step.graph, step.target, None
        if graph is not None and graph.follow is not None:
            return graph.follow(ids, step.num_new)
        if target is None or self._drafter is None:
            return None
        return self._drafter.follow(target, ids, step.num_new)

    def _sample(
        self, step: LaunchedStep, rows: SamplingRows, late: LateInputs | None
    ) -> torch.Tensor:
        """Choose tokens, and copy them to the host. Returns them, int32 [R]."""
        graph = step.graph
        if graph is not None:
            asked = self._flags.asked(rows.slots)
            if not asked & SPECIAL:
                if late is not None:
                    places = places_of(rows, late)
                    logits = graph.logits()
                    self._sampler.mask(
                        logits, places if graph.at is None else graph.at[places], late
                    )
                    graph.choose_again(bool(asked & DRAWS))
                elif asked & DRAWS:
                    graph.draw()
                step.at, step.num_new, step.verified = graph.at, graph.num_new, graph.verified
                step.fetch_to_host(self._transfer, graph.ids)
                return graph.ids
            logits = graph.logits()
            if graph.at is None:
                step.logits = logits[: len(rows.plan_rows)]
            else:
                (at,) = self._transfer.send((graph.at,))
                step.logits = logits[at]
                rows = rows.at(at)
        assert step.logits is not None, "a step with sampling rows has logits"
        sampled = self._sampler(step.logits, rows, late)
        step.logits = None
        step.logprobs, step.num_new = sampled.logprobs, sampled.num_new
        step.fetch_to_host(self._transfer, sampled.ids)
        return sampled.ids


def _empty_arena(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeros, uint8 [pages, bytes]. The host allocates their memory lazily."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
    return torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
