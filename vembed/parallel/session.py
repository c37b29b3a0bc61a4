"""Session: process group, device, precision, strategy and Accelerator of a process, from start to cleanup."""

import itertools
import logging
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule

from vembed.config.decisions import Decision, FsdpConfig, ResolvedRun, Strategy
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.errors import RunError, UserError
from vembed.models.families.model_files import is_reranker, read_model
from vembed.parallel import collectives, sharding
from vembed.parallel.devices import GIB, bf16_instructions, choose_device
from vembed.parallel.environment import ELSEWHERE, interface_to, read_rank_info
from vembed.parallel.launch_check import Heartbeats, LaunchCheck, RankFacts
from vembed.parallel.parameters import share_batch_norms
from vembed.parallel.placement import (
    FITS_SHARE,
    Layout,
    Placement,
    memory_of_a_process,
    place,
)

log = logging.getLogger("vembed")

DEFAULT_TIMEOUT_MINUTES = 30.0
"""Timeout of the collectives of a command. A training run has the option dist_timeout_minutes."""
_CHANGED_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "CUBLAS_WORKSPACE_CONFIG",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "GLOO_SOCKET_IFNAME",
    "LOCAL_WORLD_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
)
"""Environment variables that a session or Accelerate sets. They are restored at the end, for the next run of this process."""


class Session(AbstractContextManager["Session"]):
    """State of this process in a run. Context manager: the exit destroys the process group.

    Made by `start_session` for a training run, and by `start_command_session` for a command that uses a model.
    """

    placement: Placement
    """Every decision of a training run. The session of a command has none."""
    layout: Layout
    """Where the model lies, on which devices, and in which precision."""
    accelerator: Accelerator

    def __init__(
        self,
        rank_facts: RankFacts,
        *,
        timeout_minutes: float,
        debug: bool = False,
    ) -> None:
        """Join the other processes. `rank_facts` gives values that must be equal on all ranks. It is called before data
        or model are read.

        The order matters: the device is chosen before the process group starts, which binds to it, and torch reads the
        debug level and the allocator's settings when they are first used.
        """
        self._environment = {name: os.environ.get(name) for name in _CHANGED_VARIABLES}
        # A group of the caller's is left alone. Otherwise `close` also destroys the group that Accelerate starts for one
        # process under torchrun.
        self._owns_group = not dist.is_initialized()
        self.timeout_minutes = timeout_minutes
        self.heartbeats: Heartbeats | None = None
        """None in a run of one process."""
        self.reduces_each_micro_batch = False
        """FSDP: reduce gradients after every micro-batch instead of once per step, because unsharded gradients would
        not fit in memory. The sum is the same."""
        self.keeps_gathered = False
        """FSDP2: parameters stay gathered between the micro-batches of a step, because they fit in memory."""
        self.all_reduces_once = False
        """HYBRID_SHARD where gradients are reduced after every micro-batch: inside each machine only, and between the
        machines once per step."""
        try:
            self.ranks = read_rank_info()
            self.device = choose_device(self.ranks)
            if debug:
                os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
                dist.set_debug_level_from_env()  # type: ignore[attr-defined]
            if self.ranks.world_size == 1:
                rank_facts(self.ranks)
            elif not dist.is_initialized():
                self._join(rank_facts)
            self.rank = self.ranks.rank
            self.world_size = self.ranks.world_size
            self.local_rank = self.ranks.local_rank
            self.local_world_size = self.ranks.local_world_size
            self.is_main = self.rank == 0
            """True on rank 0, which writes files and the console log."""
            # Machines may differ in memory and processor, but all ranks must make the same decisions. So each rank takes the
            # smallest memory, and instructions only if every CPU has them.
            instructions = bf16_instructions()
            memory = memory_of_a_process(self.ranks, self.device)
            # One collective for both: the minimum is the negative of the maximum of the negatives.
            negative_memory, lacks_instructions = collectives.max_ints(
                [-memory, int(instructions is None)]
            )
            self.memory = -negative_memory
            """Bytes that a process has: of its GPU, or its part of the machine's memory; the least of all processes."""
            self.instructions = None if lacks_instructions else instructions
            """The instructions for bfloat16 that the CPUs of all processes have."""
        except BaseException:
            self.close()
            raise

    def lay_out(
        self,
        layout: Layout,
        *,
        uses_qlora: bool = False,
        syncs_batch_norms: bool = False,
    ) -> None:
        """Take the decisions about the model, and make the Accelerator that follows from them."""
        self.layout = layout
        self.syncs_batch_norms = syncs_batch_norms
        self.strategy = layout.strategy.value
        self.mixed_precision = layout.precision.value
        """Resolved precision of the arithmetic."""
        self.fsdp = layout.fsdp
        """FSDP settings if the model is sharded, else None."""
        is_built_on_device = self.fsdp is None or uses_qlora
        self.model_device = self.device if is_built_on_device else torch.device("cpu")
        """Device on which the model is built. A model for FSDP is built in host memory and then sharded."""
        self._only_rank0_reads = False
        """True if only rank 0 reads the weights from the files, and sends the others their shards."""
        # Not 4-bit weights: their shards would lack the quantisation tables.
        if self.fsdp is not None and not uses_qlora:
            # FSDP1 broadcasts weights on GPUs only.
            is_cuda = self.device.type == "cuda"
            self._only_rank0_reads = self.fsdp.version == 2 or is_cuda
        self.builds_empty = self._only_rank0_reads and self.rank > 0
        """True if this process builds the model without weights and receives its shards from rank 0."""
        log.info(f"device: {self.device}; mixed precision: {layout.precision}")
        log.info(f"strategy: {layout.strategy}")
        # Another trainer in this process, in a notebook for example, may have left a state of another precision or device,
        # which Accelerate would refuse to change.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # The launcher may have set it to true. Models are sharded by torch itself (vembed.parallel.sharding).
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        # Under FSDP its own policy sets the precision, and Accelerate would also convert master weights.
        precision = self.mixed_precision if self.fsdp is None else "no"
        on_cpu = self.device.type == "cpu"
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
        self.mesh = None if self.fsdp is None else sharding.hybrid_mesh(layout)

    def prepare(
        self, model: nn.Module, layer_classes: tuple[str, ...] = ()
    ) -> nn.Module:
        """Move the model to the device, set its precision, synchronise its weights and shard it. Collective.

        `layer_classes`: FSDP units if the config names none. Create the optimizer from the returned model: FSDP
        replaces the parameters.
        """
        # from_pretrained leaves a backbone in evaluation mode, which has no dropout and skips gradient checkpointing.
        model.train()
        share_batch_norms(model, self.device, shared=self.syncs_batch_norms)
        if self.fsdp is not None:
            # Before sharding: afterwards a parameter counts only this rank's shard.
            self._choose_what_stays_unsharded(model)
            model = sharding.shard(
                model,
                self.layout,
                layer_classes,
                mesh=self.mesh,
                only_rank0_reads=self._only_rank0_reads,
            )
            if self.layout.is_hybrid and self.reduces_each_micro_batch:
                self.all_reduces_once = sharding.all_reduces_once(model, self.fsdp)
            return model
        # evaluation_mode gives device placement and autocast without DDP. DDP reduces gradients in one backward pass and
        # would miss towers that are not part of the last micro-batch. `TrainingStep.synchronise` reduces
        # them once per step instead.
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
        if self.mixed_precision != "no":
            # The forward runs under autocast. By default peft would cast the input of each adapted layer to float32, for
            # dropout, and autocast would cast it back.
            for module in model.modules():
                if "cast_input_dtype_enabled" in vars(module):
                    vars(module)["cast_input_dtype_enabled"] = False
        # Replicas start from the weights of rank 0.
        collectives.broadcast_tensors([*model.parameters(), *model.buffers()])
        return model

    def keep_gathered(self, model: nn.Module, *, on: bool) -> None:
        """FSDP2: keep the parameters of a sharded model gathered between micro-batches, where they fit in memory: fewer
        all-gathers. Switch it off before the last backward pass of a step: then `reshard_after_forward` applies again."""
        if self.keeps_gathered and isinstance(model, FSDPModule):
            assert self.fsdp is not None
            model.set_reshard_after_forward(self.fsdp.reshard_after_forward and not on)
            model.set_reshard_after_backward(not on)

    def barrier(self) -> None:
        """Block until every rank has called it."""
        collectives.barrier()

    def close(self, *, waits: bool = True) -> None:
        """Destroy the group that this session started, and restore settings and environment. Further calls are no-ops.

        `waits`: wait for collectives that are still running. False aborts them: after a failure they may wait for another
        rank for ever.
        """
        if self.heartbeats is not None:
            self.heartbeats.stop()
        if self._owns_group and dist.is_initialized():
            collectives.end_group(waits=waits)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self.world_size > 1:
            error.add_note(f"rank {self.rank} of {self.world_size}")
        failed = isinstance(error, Exception) and not isinstance(error, UserError)
        hang_report = None
        if failed and error is not None and self.heartbeats is not None:
            hang_report = self.heartbeats.hang_report(error)
        self.close(waits=not failed)
        if hang_report is not None:
            raise RunError(hang_report) from error

    def _choose_what_stays_unsharded(self, model: nn.Module) -> None:
        """Set `reduces_each_micro_batch` and `keeps_gathered`: what stays unsharded between the micro-batches of a step.

        Both trade memory for communication. Gradients that are reduced once per step are held unsharded until then. If
        parameters are not kept gathered, a step of n micro-batches gathers every unit 2n times (forward and backward), or
        3n times with Gradient Cache (two forward passes).
        """
        layout = self.layout
        is_half = self.mixed_precision != "no"
        gradient_bytes = 0
        parameter_bytes = 0
        for parameter in model.parameters():
            # FSDP gathers parameters in the dtype of the arithmetic, and accumulates gradients in float32.
            num_bytes = 2 if is_half else parameter.element_size()
            parameter_bytes += parameter.numel() * num_bytes
            if parameter.requires_grad:
                gradient_bytes += 4 * parameter.numel()
        self.reduces_each_micro_batch = layout.reduces_each_micro_batch(gradient_bytes)
        self.keeps_gathered = layout.keeps_gathered(parameter_bytes)
        log.info(
            f"gradients are reduced after every micro-batch: {self.reduces_each_micro_batch} (whole ones take "
            f"{gradient_bytes / GIB:.2f}GB on each process); parameters stay gathered for a step: {self.keeps_gathered} "
            f"({parameter_bytes / GIB:.2f}GB); either may take at most {layout.unsharded_bytes_limit / GIB:.2f}GB"
        )

    def _join(self, rank_facts: RankFacts) -> None:
        """Find the other processes, compare how all were started, and start the process group.

        Count the processes of this machine if no launcher has. With GPUs the group also gets a gloo backend for CPU
        tensors.
        """
        on_gpu = self.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        check = LaunchCheck(self.ranks, self.timeout_minutes)
        # torchrun's store outlives a group, and the processes that --max-restarts starts again. Without a prefix the next
        # group would read the addresses of the last one.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"vembed-{attempt}-{next(_groups)}"
        store = PrefixStore(prefix, check.connect())
        run_id, self.ranks = check.check(store, rank_facts)
        log.info(f"run id: {run_id}")
        ranks = self.ranks
        if ranks.world_size > ranks.local_world_size:
            _choose_interface()  # read by gloo when the group starts
        try:
            dist.init_process_group(
                backend,
                timeout=timedelta(minutes=self.timeout_minutes),
                device_id=self.device if on_gpu else None,
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
            if isinstance(error, dist.DistStoreError | dist.DistNetworkError):
                raise check.not_found(problem) from error
            if "connectFullMesh" not in str(error):
                raise
            raise UserError(
                f"Rank {ranks.rank} found the address of every process, and cannot reach one of them: set "
                f"GLOO_SOCKET_IFNAME (now {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) to the interface that leads "
                f"to the other machines, on each of them, and let them open any port to each other ({problem})."
            ) from error
        log.info(
            f"processes: {ranks.world_size}, {ranks.local_world_size} of them on this machine; backend: {backend} "
            f"({'GPUs' if on_gpu else 'no GPU'}); a collective waits {self.timeout_minutes:g} minutes at most"
        )
        self.heartbeats = Heartbeats(ranks, store)


_groups = itertools.count()
"""Number of process groups that this process has joined; equal on all processes of a launch."""


def start_session(
    source: ResolvedRun | TrainConfig,
    rank_facts: RankFacts = lambda _: {},
) -> Session:
    """Start the session of a training run: join the other processes, place the run on them and their devices, and log
    each decision with its reason.

    `rank_facts`: see `Session`.
    """
    run = resolve_run(source)
    config = run.config
    session = Session(
        rank_facts,
        timeout_minutes=run.timeout_minutes.value,
        debug=config.logging.debug,
    )
    try:
        if config.run.deterministic:
            # cuBLAS reads it at its first matrix product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        placement = place(
            run,
            session.ranks,
            session.device,
            session.memory,
            instructions=session.instructions,
        )
        session.placement = placement
        session.lay_out(
            placement,
            uses_qlora=config.adapters.use_qlora,
            syncs_batch_norms=config.parallel.sync_batchnorm,
        )
        log.info(f"gradient checkpointing: {placement.recomputation}")
        # The notes on FSDP are for sharded runs, and for runs whose FSDP options ask for plain copies (NO_SHARD).
        asks_for_copies = run.fsdp is None and session.world_size > 1
        notes = list(placement.notes)
        if placement.fsdp is not None or asks_for_copies:
            notes = [*run.fsdp_notes, *notes]
        for line in notes:
            log.info(line)
    except BaseException:
        session.close()
        raise
    return session


def start_command_session(
    model: str | None = None,
    strategy: Literal["auto", "ddp", "fsdp"] = "ddp",
    *,
    timeout_minutes: float = DEFAULT_TIMEOUT_MINUTES,
) -> Session:
    """Start the session of a command that uses models without training: replicated or sharded, in the dtype of their files.

    `strategy`: fsdp shards the models that are passed to `prepare`. auto does so if the weights of `model` take more than
    FITS_SHARE of the memory of a process.
    """
    session = Session(lambda _: {}, timeout_minutes=timeout_minutes)
    try:
        chosen: Strategy = "single"
        if session.world_size > 1 and strategy != "auto":
            chosen = strategy
        elif session.world_size > 1:
            assert model is not None
            source = read_model(model, is_reranker=is_reranker(model))
            files = source.backbone.rglob("*.safetensors")
            num_bytes = sum(path.stat().st_size for path in files)
            fits = num_bytes <= FITS_SHARE * session.memory
            chosen = "ddp" if fits else "fsdp"
        session.lay_out(
            Layout(
                ranks=session.ranks,
                device=session.device,
                memory=session.memory,
                strategy=Decision(chosen, "strategy"),
                fsdp=FsdpConfig() if chosen == "fsdp" else None,
                precision=Decision("no", "the dtype of the weights"),
            )
        )
    except BaseException:
        session.close()
        raise
    return session


def _choose_interface() -> None:
    """Set gloo's network interface. By default gloo resolves the host name, which is loopback on many machines."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = os.environ["MASTER_ADDR"]
    interface = interface_to(address)
    why = f"it leads to {address}"
    # Of several "machines" on this one, loopback is the right interface.
    is_meant = address == "localhost" or address.startswith("127.")
    if interface == interface_to("127.0.0.1") and not is_meant:
        # Debian's /etc/hosts maps a machine's own name to 127.0.1.1; other machines resolve it to the real address.
        interface = interface_to(ELSEWHERE)
        why = f"the default route's, because {address} is loopback on this machine"
    if interface is None:
        log.warning(
            f"network: no interface leads to {address}, the address of machine 0: give one that the others reach to "
            "--main-process-ip (MASTER_ADDR), or the interface to GLOO_SOCKET_IFNAME"
        )
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    log.info(
        f"network: interface {interface} ({why}; GLOO_SOCKET_IFNAME names another)"
    )
