"""Prediction of the memory of a run's processes and of its hours, from the shapes of its model, without weights."""

from pathlib import Path

import torch

from vembed.config.decisions import ResolvedRun, decide_epochs, steps_of_epochs
from vembed.config.schema import DataSection, ModelSection
from vembed.data_tools.starter import read_sample, sampled_items
from vembed.errors import UserError
from vembed.models.families.description import describe
from vembed.models.processors import load_tokenizer
from vembed.parallel.devices import Gpu, bf16_instructions
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import Placement, memory_of_a_process, place
from vembed.parallel.step_memory import MemoryEstimate
from vembed.progress import duration

FITS = 0.9
"""A run fits if it needs at most this fraction of the memory."""
USED_SHARE = {True: 0.35, False: 0.6}
"""Assumed share of the peak that training reaches: in 16 bits, and in float32."""
SECONDS_PER_HOUR = 3600.0


def place_here(
    run: ResolvedRun,
    ranks: RankInfo,
    gpu: Gpu | None = None,
) -> Placement:
    """Return the placement of a run on this machine, or on GPUs that are not here."""
    has_gpu = gpu is not None or torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    available = memory_of_a_process(ranks, device) if gpu is None else gpu.memory
    instructions = bf16_instructions()
    return place(run, ranks, device, available, gpu=gpu, instructions=instructions)


def training_time(
    estimate: MemoryEstimate,
    gpu: Gpu | None,
) -> tuple[float | None, str]:
    """Return the estimated seconds and a line with what they rest on; without an estimate None, and why."""
    placement = estimate.placement
    size = estimate.size
    config = placement.run.config
    is_half = placement.precision.value != "no"
    peak = None
    if gpu is not None:
        peak = gpu.half_tflops if is_half else gpu.single_tflops
    if gpu is None or peak is None:
        return None, "hours: not estimated (--gpu 2xA100-80GB names a GPU)"
    try:
        num_examples, tokens, length = data_size(config.model, config.data)
    except UserError as error:
        return None, f"hours: not estimated ({error})"
    world = placement.ranks.world_size
    micro_steps = config.batch.gradient_accumulation_steps
    per_step = placement.num_examples * world * micro_steps
    steps = config.optimizer.max_steps
    if steps is None:
        num_train = num_examples * (1.0 - (config.data.val_split or 0.0))
        has_logit_scale = describe(config.model).family_traits.has_logit_scale_and_bias
        epochs = decide_epochs(
            config.optimizer,
            config.model,
            int(num_train),
            has_logit_scale=has_logit_scale,
        ).value
        batches = num_train // (placement.num_examples * world)
        steps = steps_of_epochs(epochs, batches, micro_steps)
    # Operations in forward passes: one, and in the backward pass the products for the inputs' gradients and those for the
    # trained weights' gradients, each as many as a forward pass has.
    num_passes = 2.0 + size.trained / max(size.total, 1)
    if placement.recomputation.value:
        num_passes += 1.0
    # Gradient Cache runs the forward pass of what it does not keep twice.
    num_passes += estimate.repeated_share(placement.num_examples * tokens)
    # A multiplication and an addition for each weight; attention has two products of length x hidden per token.
    inside_layers = size.layer_parameters * size.num_layers or size.total
    attention = 4.0 * size.num_layers * size.hidden * length
    operations = num_passes * (2.0 * inside_layers + attention)
    # Every process has this peak.
    speed = peak * 1e12 * USED_SHARE[is_half] * world
    seconds = steps * per_step * tokens * operations / speed
    hours = f"about {seconds / SECONDS_PER_HOUR:.2g} ({duration(seconds)})"
    if seconds < 1:
        hours = "about 0 (under 1 s)"
    line = (
        f"hours: {hours}, often off by a factor of two: {steps:,d} steps "
        f"x {per_step:,d} examples x {tokens:,.0f} tokens, {operations / 1e9:,.3g} GFLOP per token, at an assumed "
        f"{USED_SHARE[is_half]:.0%} of the {peak:.4g} TFLOPS of {gpu.name}'s data sheet, on {world} process(es); "
        "without evaluations and loading"
    )
    return seconds, line


def data_size(model: ModelSection, data: DataSection) -> tuple[int, float, float]:
    """Return the number of training examples of an embedding model, the mean tokens of one (its query, positives and
    negatives), and those of a text, all from the first records of each source. Raise UserError where the data are not here, or
    are not text alone."""
    refusal = UserError("data_path must be files of texts that are here")
    description = describe(model)
    if description.modalities == ("image",):
        raise refusal
    if description.is_reranker:
        raise UserError("only for embedding models")
    tokenizer = load_tokenizer(description)
    num_examples = 0
    tokens = 0.0
    num_texts = 0.0
    for source in data.sources():
        mapping = source.column_mapping or data.column_mapping
        sample = read_sample(Path(source.path).expanduser())
        queries, documents = sampled_items(sample, mapping, data.max_negatives)
        items = queries + documents
        if not items or any(item.images for item in items):
            raise refusal
        texts = [item.text or "" for item in items]
        limit = description.max_length
        encoded = tokenizer(texts, truncation=True, max_length=limit)
        lengths = [len(token_ids) for token_ids in encoded["input_ids"]]
        # The sample stands for the whole file.
        share = sample.num_records / len(sample.records)
        num_examples += sample.num_records
        num_texts += share * len(lengths)
        tokens += share * sum(lengths)
    return num_examples, tokens / num_examples, tokens / num_texts
