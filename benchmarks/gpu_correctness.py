"""Correctness on the device: attention kernels, equal gradients, optimizers, QLoRA, float16, memory, host waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_models import (
    BERT,
    QWEN_SMALL,
    Shape,
    make_model,
    make_rows,
    small,
    write_data,
)
from benchmarks.gpu_record import (
    NotMeasuredError,
    Record,
    Trained,
    Values,
    quick_compiler,
    relative,
    require,
    train,
)
from vembed.config.decisions import Decision, ResolvedRun, Strategy
from vembed.models import attention
from vembed.parallel import placement
from vembed.parallel.step_memory import ModelSize
from vembed.training.step import TrainingStep

HALF_TOLERANCE = 0.03
"""Largest relative difference of gradients in 16 bits."""
TOLERANCE = 1e-3
"""The same in float32."""
HOST_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "aten::item",
    "aten::_local_scalar_dense",
)


class Attention(nn.Module):
    """A module that an attention function reads: it has nothing of its own."""

    def __init__(self, causal: bool, groups: int) -> None:
        super().__init__()
        self.is_causal = causal
        self.num_key_value_groups = groups


def run_correctness(record: Record, folder: Path) -> None:
    """Measure every row of this part."""
    attention_rows(record)
    shape = small(BERT)
    model = make_model(shape, folder / "bert", torch.device("cpu"))
    data = write_data(shape, make_rows(shape, 4), folder / "bert-data")
    run = partial(
        train,
        record,
        model,
        data,
        global_batch_size=shape.batch,
        max_length=shape.max_length,
    )
    gradient_rows(record, run, model, folder)
    optimizer_rows(record, run, folder)
    record.row("correctness", "QLoRA", lambda: qlora(record, folder), limit=60)
    record.row(
        "correctness", "float16 gradient scaler", lambda: float16(record, run, folder)
    )
    record.row(
        "correctness", "out of memory", lambda: out_of_memory(record, folder), limit=60
    )
    record.row("correctness", "host waits", lambda: host_waits(record, run, folder))


# ---- attention -----------------------------------------------------------------------------------------------------


def attention_rows(record: Record) -> None:
    """Compare packed attention with attention of each text by itself, in float32."""
    for size in (64, 128):
        for groups in (1, 4):
            for causal in (False, True):
                for window in (None, 33):
                    name = f"attention: size {size}, groups {groups}, causal {causal}, window {window}"
                    record.row(
                        "correctness",
                        name,
                        partial(attention_errors, record, size, groups, causal, window),
                        limit=30,
                    )


def attention_errors(
    record: Record, size: int, groups: int, causal: bool, window: int | None
) -> Values:
    """Return the relative differences of the output and the gradients."""
    lengths = [3, 70, 1, 40] if record.is_small else [5, 300, 1, 128, 511, 64]
    heads = 4
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    if record.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        raise NotMeasuredError("the GPU is older than flash attention allows")
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(
            1, count, total, size, device=record.device, dtype=dtype
        ).requires_grad_()
        for count in (heads, heads // groups, heads // groups)
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).to(record.device, torch.int32)
    module = Attention(causal, groups).to(record.device).train()
    packed = attention.Packed(starts, max(lengths))
    output, _ = attention.attention(
        module,
        query,
        key,
        value,
        None,
        dropout=0.0,
        sliding_window=window,
        packed=packed,
    )
    output = output[0]
    reference = _reference(query, key, value, lengths, groups, causal, window)
    weight = torch.randn_like(reference)
    gradients = torch.autograd.grad(
        (output.float() * weight).sum(), (query, key, value)
    )
    expected = torch.autograd.grad((reference * weight).sum(), (query, key, value))
    pairs = {
        "forward": (output, reference),
        **dict(zip("qkv", zip(gradients, expected, strict=True), strict=True)),
    }
    values = {
        name: _difference(ours.detach().float(), exact.detach().float())
        for name, (ours, exact) in pairs.items()
    }
    limit = HALF_TOLERANCE if dtype == torch.bfloat16 else TOLERANCE
    require(
        max(values.values()) < limit, f"off by {values}, at most {limit} is allowed"
    )
    return values


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    groups: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Return plain attention, [tokens, heads, size] in float32."""
    parts = []
    for queries, keys, values in zip(
        *(states.split(lengths, dim=2) for states in (query, key, value)), strict=True
    ):
        keys, values = (  # noqa: PLW2901
            states.float().repeat_interleave(groups, dim=1) for states in (keys, values)
        )
        scores = queries.float() @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
        place = torch.arange(queries.shape[2], device=query.device)
        ahead = place[None, :] - place[:, None]
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (ahead.abs() >= window)
        parts.append(
            functional.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            @ values
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _difference(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


# ---- equal gradients -----------------------------------------------------------------------------------------------

Run = Callable[..., Trained]


def gradient_rows(record: Record, run: Run, model: Path, folder: Path) -> None:
    """Compare the updates of two steps of SGD, with every way of computing the same gradient."""
    from safetensors.torch import load_file

    start = load_file(model / "model.safetensors")
    plain: Values = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": 2,
        "max_grad_norm": 0.0,
    }
    exact = {**plain, "mixed_precision": "no", "use_gradient_cache": False}
    base: dict[str, Trained] = {}

    def reference(name: str, options: Values) -> Trained:
        if name not in base:
            base[name] = run(folder / f"base-{name}", **options)
        return base[name]

    variants: dict[str, Values] = {
        "Gradient Cache": {"use_gradient_cache": True, "micro_batch_tokens": 128},
        "recomputed": {"gradient_checkpointing": True},
        "compiled": {"torch_compile": True},
        "FSDP2 on a mesh of one": {"strategy": "fsdp", "fsdp_version": 2},
    }

    def same(name: str, options: Values) -> Values:
        exact_run = reference("float32", exact)
        place = folder / f"same-{name.replace(' ', '-')}"
        with (
            quick_compiler(record),
            sharded_alone() if options.get("strategy") == "fsdp" else nullcontext(),
        ):
            narrow_run = run(place, **{**exact, **options})
        if options.get("strategy") == "fsdp":
            require(
                "strategy: fsdp" in (place / "training_log.txt").read_text(),
                "the model was not sharded",
            )
        off = relative(narrow_run.weights(), exact_run.weights(), start)
        require(off < TOLERANCE, f"gradients are off by {off:.1e}")
        return {
            "gradients": off,
            "losses": _largest(narrow_run.losses, exact_run.losses),
        }

    for name, options in variants.items():
        record.row(
            "correctness",
            f"equal gradients: {name}",
            partial(same, name, options),
            limit=60,
        )

    def replayed() -> Values:
        # The dropout masks of the second forward pass must be those of the first, also inside of attention kernels.
        dropping = make_model(
            small(BERT), folder / "dropping", torch.device("cpu"), dropout=0.1
        )
        options = {**exact, "model_name": str(dropping), "micro_batch_tokens": 128}
        options["mixed_precision"] = "bf16" if record.device.type == "cuda" else "no"
        plain_run, cached = (
            run(folder / f"dropout-{cache}", **{**options, "use_gradient_cache": cache})
            for cache in (False, True)
        )
        off = relative(
            cached.weights(),
            plain_run.weights(),
            load_file(dropping / "model.safetensors"),
        )
        require(off < TOLERANCE, f"gradients are off by {off:.1e}")
        return {"gradients": off}

    record.row(
        "correctness",
        "equal gradients: Gradient Cache with dropout",
        replayed,
        limit=60,
    )

    def narrow() -> Values:
        if record.device.type != "cuda":
            raise NotMeasuredError("bfloat16 kernels of GPUs need CUDA")
        exact_run = reference("float32", exact)
        bf16 = {**exact, "mixed_precision": "bf16"}
        packed = run(folder / "bf16", **bf16)
        padded = run(folder / "padded", **bf16, padding_free=False)
        values = {
            "packed to float32": relative(packed.weights(), exact_run.weights(), start),
            "packed to padded": relative(packed.weights(), padded.weights(), start),
        }
        require(
            max(values.values()) < 2 * HALF_TOLERANCE, f"gradients are off by {values}"
        )
        return values

    record.row(
        "correctness", "equal gradients: bfloat16, packed and padded", narrow, limit=60
    )


@contextmanager
def sharded_alone() -> Iterator[None]:
    """Shard in one process too, where a run leaves the model whole: the only way to FSDP's code on one GPU."""

    def choose(
        run: ResolvedRun,
        ranks: object,
        memory: int,
    ) -> tuple[Decision[Strategy], ModelSize, list[str]]:
        size = placement.measure(run.config)
        return Decision("fsdp", "a mesh of one"), size, []

    # A session leaves a group alone that is there already.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        with patch.object(placement, "_choose_strategy", choose):
            yield
    finally:
        dist.destroy_process_group()


def _largest(ones: list[float], others: list[float]) -> float:
    return max(
        abs(loss - expected) / max(abs(expected), 1e-9)
        for loss, expected in zip(ones, others, strict=True)
    )


# ---- optimizers, QLoRA, float16 ------------------------------------------------------------------------------------


def optimizer_rows(record: Record, run: Run, folder: Path) -> None:
    """Compare a run that is saved and resumed with one that is not, for each optimizer with its own kinds of state."""

    def resumed(optim: str) -> Values:
        _need("bitsandbytes")
        if optim.startswith("paged") and record.device.type != "cuda":
            raise NotMeasuredError("paged memory needs CUDA")
        options: Values = {"optim": optim, "max_steps": 4, "mixed_precision": "no"}
        whole = run(folder / optim, **options)
        half = folder / f"{optim}-half"
        run(half, **{**options, "max_steps": 2}, save_steps=1)
        again = run(half, **options, save_steps=1, resume=True)
        off = _largest(again.losses[-2:], whole.losses[-2:])
        require(off < TOLERANCE, f"losses after resuming are off by {off:.1e}")
        return {"losses after resuming": off}

    for optim in ("adamw_8bit", "paged_adamw_8bit"):
        record.row("correctness", f"save and resume: {optim}", partial(resumed, optim))


def qlora(record: Record, folder: Path) -> Values:
    """Return the losses of a model in 4 bits with adapters."""
    _need("bitsandbytes")
    shape = small(QWEN_SMALL)
    model = make_model(shape, folder / "qlora", torch.device("cpu"))
    data = write_data(shape, make_rows(shape, 4), folder / "qlora-data")
    options: Values = {
        "global_batch_size": shape.batch,
        "max_length": shape.max_length,
        "learning_rate": 1e-3,
    }
    result = train(
        record,
        model,
        data,
        folder / "qlora-out",
        use_lora=True,
        quantize_weights="nf4",
        max_steps=4,
        **options,
    )
    require(all(map(math.isfinite, result.losses)), f"losses {result.losses}")
    return {"losses": result.losses}


def float16(record: Record, run: Run, folder: Path) -> Values:
    """Compare the losses of float16 with a scaled gradient with those of float32."""
    if record.device.type != "cuda":
        raise NotMeasuredError("float16 with a gradient scale needs CUDA")
    options: Values = {"max_steps": 4}
    narrow = run(folder / "fp16", mixed_precision="fp16", **options)
    wide = run(folder / "fp32", mixed_precision="no", **options)
    off = _largest(narrow.losses, wide.losses)
    require(off < HALF_TOLERANCE, f"losses are off by {off:.1e}")
    return {"losses": off}


def _need(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise NotMeasuredError(f"{package} is not installed")


# ---- memory and waiting --------------------------------------------------------------------------------------------


def out_of_memory(record: Record, folder: Path) -> Values:
    """Compare a run that runs out of memory, and goes on with a smaller budget, with one that does not."""
    if record.device.type != "cuda":
        raise NotMeasuredError("a limit on the memory of a device needs CUDA")
    from safetensors.torch import load_file

    shape = Shape("bert-medium", 8, 512, 8, 2048, max_length=256, batch=1024)
    model = make_model(shape, folder / "medium", record.device)
    data = write_data(shape, make_rows(shape, 2), folder / "medium-data")
    options: Values = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": 2,
        "max_grad_norm": 0.0,
        "mixed_precision": "no",
        "use_gradient_cache": True,
        "global_batch_size": shape.batch,
        "max_length": shape.max_length,
    }
    reference_run = train(
        record, model, data, folder / "medium-fits", micro_batch_tokens=4096, **options
    )
    record.free()
    total = torch.cuda.get_device_properties(record.device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min((reference_run.peak_bytes + 2**30) / total, 1.0)
    )
    try:
        limited_run = train(
            record,
            model,
            data,
            folder / "medium-halved",
            micro_batch_tokens=262_144,
            **options,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    log = (limited_run.folder / "training_log.txt").read_text()
    require(
        "out of memory" in log.lower(),
        "the run did not run out of memory, so nothing was shown",
    )
    off = relative(
        limited_run.weights(),
        reference_run.weights(),
        load_file(model / "model.safetensors"),
    )
    require(off < TOLERANCE, f"gradients are off by {off:.1e}")
    return {"gradients": off}


def host_waits(record: Record, run: Run, folder: Path) -> Values:
    """Count waits of the host for the device inside the forward and backward passes of the third step."""
    counts: dict[str, int] = {}
    calls = {"encode": 0, "backward": 0}

    @contextmanager
    def counted(stage: str) -> Iterator[None]:
        calls[stage] += 1
        if calls[stage] != 3:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if record.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        for event in profiler.key_averages():
            if event.key in HOST_WAITS:
                counts[f"{stage}: {event.key}"] = event.count

    encode = TrainingStep.encode
    backward = TrainingStep.backward

    def watched_encode(self: TrainingStep, *arguments: Any) -> None:
        with counted("encode"):
            encode(self, *arguments)

    def watched_backward(self: TrainingStep, *arguments: Any) -> None:
        with counted("backward"):
            backward(self, *arguments)

    TrainingStep.encode = watched_encode  # type: ignore[method-assign]
    TrainingStep.backward = watched_backward  # type: ignore[method-assign]
    try:
        run(folder / "waits", max_steps=3, use_gradient_cache=True)
    finally:
        TrainingStep.encode = encode  # type: ignore[method-assign]
        TrainingStep.backward = backward  # type: ignore[method-assign]
    require(
        calls["encode"] == 3,
        f"{calls} calls were seen, and the third is the one that is looked at",
    )
    if record.device.type == "cuda":
        # The profiler itself synchronises once at its end; everything else is the step's.
        waits = {
            name: count
            for name, count in counts.items()
            if not name.endswith("cudaDeviceSynchronize")
        }
        require(not waits, f"the host waits: {waits}")
    return {"counts": counts}
