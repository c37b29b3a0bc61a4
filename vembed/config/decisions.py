"""Decisions of a run, each made once, with its value and its reason.

ResolvedRun: those that follow from the config alone. Then what `auto` means where it depends on the model or the data:
learning rate, epochs and intervals. No decision needs a device. The same config, model and data give the same ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from vembed.config.accelerate_file import AccelerateFile
from vembed.config.options import Level, OptionValues, yaml_word
from vembed.config.schema import (
    AdapterSection,
    EvaluationSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    Options,
    ParallelSection,
    RunSection,
    TrainConfig,
    option_fields,
)
from vembed.config.values import Environment
from vembed.errors import UserError
from vembed.losses.table import LOSSES
from vembed.models.families.table import FamilyName

T = TypeVar("T")
Strategy = Literal["single", "ddp", "fsdp"]
AskedStrategy = Literal["auto"] | Strategy
Precision = Literal["no", "bf16", "fp16"]
AskedPrecision = Literal["auto"] | Precision
DEFAULT = "default"
USER_LEVELS = (Level.CONFIG, Level.COMMAND_LINE)
"""Sources in which the user sets options one by one. Presets, files and launchers bring whole groups of options."""
TIMEOUT_VARIABLE = "NCCL_TIMEOUT"
"""Seconds that a collective may take; read by older versions of torch, and here where the config gives no limit."""
DEFAULT_MIN_NUM_PARAMS = 1_000_000
FSDP_OPTIONS = tuple(name for name in option_fields() if name.startswith("fsdp_"))


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A decision of a run: the value, and why it was chosen."""

    value: T
    reason: str
    """Reason, as the log and a dry run say it."""
    origin: str = DEFAULT
    """Origin of the value: `cfg.yaml:7`, `command line`, `accelerate launch`, a preset's file, or `default`."""

    def as_record(self) -> dict[str, str]:
        """Return value, reason and origin as run.json has them. There the origin is called `source`."""
        return {"value": self.text, "reason": self.reason, "source": self.origin}

    @property
    def text(self) -> str:
        """The value as a config file would have it."""
        text = str(self.value)
        return text.lower() if isinstance(self.value, bool) else text

    def __str__(self) -> str:
        return f"{self.text} ({self.reason})"


@dataclass(frozen=True)
class FsdpConfig:
    """All resolved FSDP settings of a run."""

    version: Literal[1, 2] = 2
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = (
        "FULL_SHARD"
    )
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = (
        "TRANSFORMER_BASED_WRAP"
    )
    layer_classes: tuple[str, ...] | None = None
    """Class names or dotted paths; None: the classes that the backbone declares."""
    wrap_function: str | None = None
    """Function of the user's that chooses the units, as `file.py:function`."""
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS
    min_layer_params: int = 0
    """TRANSFORMER_BASED_WRAP: layers with fewer parameters are no units."""
    forward_prefetch: bool = False
    state_dict_type: Literal[
        "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
    ] = "SHARDED_STATE_DICT"
    reduce_dtype: str = "float32"
    origin: str = "the defaults"
    """The file or launcher that the settings start from."""

    @property
    def reshard_after_forward(self) -> bool:
        """False: parameters stay gathered between forward and backward pass."""
        return self.sharding_strategy != "SHARD_GRAD_OP"


@dataclass(frozen=True)
class ResolvedRun:
    """A config and the decisions that follow from it. `train`, `--dry-run`, `plan`, `doctor` and the log read them here, and
    decide none of them again."""

    config: TrainConfig
    origins: Mapping[str, str]
    """Option -> the origin of its value, as in `Decision`."""
    notes: tuple[str, ...]
    """Lines for the log: values that lost against a stronger source, and options without effect."""
    strategy: Decision[AskedStrategy]
    """`auto`: left to the placement, by the size of the model."""
    fsdp: FsdpConfig | None
    """The settings that hold if the model is sharded; None where that is ruled out."""
    fsdp_notes: tuple[str, ...]
    """Lines for the log of a sharded run, and of one whose FSDP options come to plain copies."""
    fsdp_given: tuple[str, ...]
    """FSDP options that the config or the command line gives, as `name: value`."""
    recomputation: Decision[bool]
    """True if activations are recomputed in the backward pass (gradient checkpointing)."""
    precision: Decision[AskedPrecision]
    processes: Decision[int | Literal["auto"]]
    """Processes on each machine."""
    machines: Decision[int]
    timeout_minutes: Decision[float]
    """Longest time that a collective waits for the other processes."""
    accelerate_file: AccelerateFile | None
    """The Accelerate file that the config or the command line names."""


def decide(
    config: TrainConfig,
    values: OptionValues,
    *,
    origins: Mapping[str, str],
    notes: Sequence[str],
    accelerate_file: AccelerateFile | None,
    fsdp_origin: str,
    env: Environment,
) -> ResolvedRun:
    """Make every decision.

    `values`: each option that any source gives, as the strongest source gives it.
    `fsdp_origin`: the file or launcher that the FSDP settings start from.
    """
    model = config.model
    parallel = config.parallel
    strategy = _strategy(parallel, values, accelerate_file, fsdp_origin)
    lines = list(notes)

    # ---- FSDP
    fsdp_values = {}
    fsdp_given = []
    for name in FSDP_OPTIONS:
        value = values.get(name)
        if value is None or value.value is None:
            continue
        fsdp_values[name] = value.value
        if value.level in USER_LEVELS:
            fsdp_given.append(str(value))
    fsdp = None
    fsdp_notes: list[str] = []
    # For `auto` too: the placement may choose FSDP later, and then needs the settings.
    if strategy.value in ("auto", "fsdp"):
        fsdp, fsdp_notes = resolve_fsdp(fsdp_values, fsdp_origin)
    elif parallel.strategy in ("auto", "fsdp"):
        fsdp_notes = [
            "fsdp_sharding_strategy: NO_SHARD shards nothing: the run uses ddp (a copy "
            "on each process)"
        ]
    else:
        for text in fsdp_given:
            lines.append(f"{text} has no effect with strategy: {strategy.value}")

    # ---- gradient checkpointing
    recomputation = default_recomputation(strategy.value)
    if model.gradient_checkpointing is not None:
        recomputation = _asked(
            "gradient_checkpointing", model.gradient_checkpointing, values
        )
    timeout, timeout_notes = _timeout(parallel.dist_timeout_minutes, values, env)
    return ResolvedRun(
        config=config,
        origins=origins,
        strategy=strategy,
        fsdp=fsdp,
        fsdp_notes=tuple(fsdp_notes),
        fsdp_given=tuple(fsdp_given),
        recomputation=recomputation,
        precision=_asked("mixed_precision", model.mixed_precision, values),
        processes=_asked("num_processes", parallel.num_processes, values),
        machines=_asked("num_machines", parallel.num_machines, values),
        timeout_minutes=timeout,
        notes=(*lines, *timeout_notes),
        accelerate_file=accelerate_file,
    )


def default_recomputation(strategy: str) -> Decision[bool]:
    """Return whether activations are recomputed where nobody asks. On GPUs the placement decides by memory instead."""
    if strategy == "fsdp":
        return Decision(True, "default with FSDP")
    return Decision(False, "default without FSDP")


def _strategy(
    parallel: ParallelSection,
    values: OptionValues,
    accelerate_file: AccelerateFile | None,
    fsdp_origin: str,
) -> Decision[AskedStrategy]:
    """Return the strategy that is asked for. Raise UserError if the Accelerate file is for another one."""
    sharding = values.get("fsdp_sharding_strategy")
    if (
        parallel.strategy in ("auto", "fsdp")
        and sharding is not None
        and sharding.value == "NO_SHARD"
    ):
        # A copy on each process, which ddp gives without wrapping.
        reason = "asked for by fsdp_sharding_strategy: NO_SHARD"
        return Decision("ddp", reason, sharding.origin)
    if parallel.strategy == "auto":
        reason = "decided by the size of the model: ddp where it fits, fsdp where it does not"
        return Decision("auto", reason)
    asked = values["strategy"]
    if parallel.strategy != "fsdp":
        reason = "asked for" if asked.key == "strategy" else f"asked for by {asked.key}"
        return Decision(parallel.strategy, reason, asked.origin)
    # No contradiction if a stronger source than the one that names the file asks for FSDP: it overrides the file.
    if (
        accelerate_file is not None
        and accelerate_file.distribution != "fsdp"
        and asked.level <= values["accelerate_config"].level
    ):
        raise UserError(
            f"{asked.key}: {asked.written_value or yaml_word(asked.value)}, but {accelerate_file.place} is for "
            f"{accelerate_file.distribution}: name a file with distributed_type: FSDP (for example accelerate_config: "
            f"accelerate_fsdp), or leave {asked.key} out"
        )
    return Decision(
        "fsdp", f"asked for, with the options of {fsdp_origin}", asked.origin
    )


def _timeout(
    minutes: float,
    values: OptionValues,
    env: Environment,
) -> tuple[Decision[float], list[str]]:
    """Return the time that a collective may take, and notes for the log. `minutes`: the option's value."""
    name = "dist_timeout_minutes"
    timeout = _asked(name, minutes, values)
    limit = env.get(TIMEOUT_VARIABLE)
    if not limit:
        return timeout, []
    try:
        seconds = float(limit)
    except ValueError:
        seconds = 0.0  # refused below
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{TIMEOUT_VARIABLE}={limit} must be a number of seconds above 0; or use {name}"
        )
    # An option overrides the environment variable, even if it has the default value.
    if name not in values:
        reason = f"{TIMEOUT_VARIABLE}={limit}"
        return Decision(seconds / 60, reason, "environment"), []
    if seconds == 60 * minutes:
        return timeout, []
    note = f"{values[name]} overrides {TIMEOUT_VARIABLE}={limit} (environment)"
    return timeout, [note]


def resolve_fsdp(values: Options, origin: str) -> tuple[FsdpConfig, list[str]]:
    """Return the settings that hold if the model is sharded, and notes for the log.

    `values`: the fsdp_* options that any source gives, the preset included. `origin`: the file or launcher that the settings start from.
    """
    # Keyword arguments of FsdpConfig: the options without their prefix, except for those that are renamed below.
    settings: dict[str, Any] = {"origin": origin}
    for name, value in values.items():
        settings[name.removeprefix("fsdp_")] = value
    policy = settings.pop("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    classes = settings.pop("transformer_layer_cls_to_wrap", None)
    size = settings.pop("min_num_params", 0)
    settings["offload"] = settings.pop("offload_params", False)
    notes = []
    settings["wrap_policy"] = policy
    if ":" in policy:  # file.py:function of the user's
        settings["wrap_function"] = policy
        settings["wrap_policy"] = "NO_WRAP"
    if classes:
        names = [classes] if isinstance(classes, str) else classes
        settings["layer_classes"] = tuple(names)
        if policy != "TRANSFORMER_BASED_WRAP":
            notes.append(
                f"fsdp_transformer_layer_cls_to_wrap: {classes} has no effect with fsdp_auto_wrap_policy: {policy}"
            )
    # fsdp_min_num_params has two meanings. With SIZE_BASED_WRAP it is the size of a unit, which needs a default. With
    # TRANSFORMER_BASED_WRAP every layer is a unit, unless a size is given.
    if size:
        settings["min_num_params"] = size
        settings["min_layer_params"] = size
        if policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
            notes.append(
                f"fsdp_min_num_params: {size:,d} has no effect with fsdp_auto_wrap_policy: {policy}"
            )
    elif policy == "SIZE_BASED_WRAP":
        notes.append(
            f"fsdp_min_num_params: {size} with SIZE_BASED_WRAP counts as {DEFAULT_MIN_NUM_PARAMS:,d} (without a size "
            "nothing would be wrapped as it should)"
        )
    fsdp = FsdpConfig(**settings)
    if fsdp.version == 2 and fsdp.state_dict_type == "LOCAL_STATE_DICT":
        raise UserError(
            "fsdp_state_dict_type: LOCAL_STATE_DICT does not exist in FSDP2: use SHARDED_STATE_DICT (each process "
            "writes its own part, and any number of processes can read them), or fsdp_version: 1"
        )
    if fsdp.state_dict_type == "LOCAL_STATE_DICT":
        notes.append(
            "fsdp_state_dict_type: LOCAL_STATE_DICT: each process writes its own pieces, as with SHARDED_STATE_DICT; here "
            "any number of processes can read them"
        )
    return fsdp, notes


def _asked(
    name: str,
    value: T,
    values: OptionValues,
) -> Decision[T]:
    """Return the decision for an option that is taken as given. The reason is its name, or the file or launcher that sets
    it."""
    asked = values.get(name)
    if asked is None:
        return Decision(value, DEFAULT)
    reason = name if asked.level in USER_LEVELS else asked.place
    return Decision(value, reason, asked.origin)


# ---- learning rate

TrainedPart = Literal["weights", "adapters", "head"]

MEASURED_WIDTH = 384
"""Hidden size of all-MiniLM-L6-v2, on which the rates were measured."""
EMBEDDING_MODEL_RATE = 8e-5
"""Peak for all weights of an embedding model of MEASURED_WIDTH. In wider models it falls in inverse proportion to the width."""
LANGUAGE_MODEL_RATE = 1.2e-4
"""The same for a language model that was not trained as an embedding model yet: it has further to go."""
MIN_RATE = 5e-6
"""Lowest peak for pretrained weights."""
MAX_RATE = 1e-4
"""Highest peak for pretrained weights of models at least as wide as MEASURED_WIDTH."""
NARROW_POWER = 3
"""In narrower models the peak rises by this power of MEASURED_WIDTH / width."""
MAX_NARROW_SHARE = 0.75
"""Largest peak for pretrained weights of a narrower model, as a share of the peak for initial weights."""
LONG_RUN_STEPS = 100
"""In runs of more steps the peak for all weights of a text model falls by the fourth root of LONG_RUN_STEPS / steps."""
MAX_LONG_RUN_STEPS = 400
"""From so many steps on it stays at 0.71 times the peak."""

TWO_TOWER_RATE = 1e-5
"""Peak for CLIP and SigLIP: their towers were trained on batches of tens of thousands of pairs."""
TWO_TOWER_WIDTH = 512
"""Hidden size of the text tower of CLIP ViT-B, for which TWO_TOWER_RATE was measured."""

ADAPTER_RATIO = 15.0
"""Peak for adapters with alpha 32: ADAPTER_RATIO * sqrt(rate_without_rise * all_weights). The two differ in narrow models
alone, where the peak for all weights is raised."""
ADAPTER_ALPHA = 32
MIN_ALPHA_FACTOR = 0.1
"""Smallest factor by which another alpha changes the peak for adapters."""
MAX_ALPHA_FACTOR = 10.0
"""Largest such factor."""
SHORT_RUN_OF_ADAPTERS = 48
"""In runs of fewer steps the peak for adapters rises by the root of SHORT_RUN_OF_ADAPTERS / steps. B begins at zero, so a
short run ends before A and B have grown together."""
MIN_RUN_OF_ADAPTERS = 16
"""In runs of fewer steps it rises no further."""

HEAD_RATE = 1e-3
"""Peak for a linear layer on the outputs of frozen towers, and for new projections."""

INITIAL_WIDTH = 512
"""Hidden size for which INITIAL_RATE was measured."""
INITIAL_RATE = 5e-4
"""Peak for initial weights of INITIAL_WIDTH dimensions. In wider models it falls by the root of the width. In narrower
ones it rises in proportion, up to MAX_INITIAL_RATE."""
MAX_INITIAL_RATE = 2e-3
PAIR_RANKING_FACTOR = 0.25
"""Factor of the peak for initial weights with losses that rank pairs."""


@dataclass(frozen=True)
class RateFacts:
    """The facts about a model that its learning rate depends on."""

    what: TrainedPart
    family: FamilyName
    width: int
    """Hidden size of the layers."""
    is_tuned: bool
    """True if the model is an embedding model already: its folder names pooling and other modules."""
    is_new: bool
    """True if the weights are initial ones, from which nothing was trained yet."""
    has_logit_scale: bool = False
    """True for CLIP and SigLIP: their weights contain the learned scale of their loss."""
    total_steps: int = SHORT_RUN_OF_ADAPTERS
    """Steps of the run. The default corrects nothing: the run is neither short nor long."""


def peak_rate(
    objective: ObjectiveSection,
    adapters: AdapterSection,
    trained: RateFacts,
) -> Decision[float]:
    """Return the learning rate of `learning_rate: auto` and the reason. docs/choosing.md has the measurements."""
    width = trained.width
    steps = trained.total_steps
    if trained.what == "head":
        return Decision(HEAD_RATE, "only layers behind the pooling are trained")
    ratio = INITIAL_WIDTH / width
    growth = ratio if ratio > 1 else math.sqrt(ratio)
    initial = min(INITIAL_RATE * growth, MAX_INITIAL_RATE)
    if trained.is_new and trained.what == "weights":
        reason = f"from scratch: initial weights of {width:,d} dimensions"
        if objective.losses is None and LOSSES[objective.loss].ranks_pairs:
            initial *= PAIR_RANKING_FACTOR
            reason += f", loss: {objective.loss}"
        return Decision(_two_digits(initial), reason)

    # The peak for all pretrained weights, first without the rise for narrow models.
    kind = trained.family.replace("_", " ")
    if trained.has_logit_scale:
        measured_width = TWO_TOWER_WIDTH
        base = TWO_TOWER_RATE
        rate_without_rise = base
        reason = f"a {kind} model"
    else:
        measured_width = MEASURED_WIDTH
        base = LANGUAGE_MODEL_RATE
        tuned = "no embedding model yet"
        if trained.is_tuned:
            base = EMBEDDING_MODEL_RATE
            tuned = "an embedding model already"
        rate_without_rise = max(base * measured_width / width, MIN_RATE)
        rate_without_rise = min(rate_without_rise, MAX_RATE)
        reason = f"a {kind} of {width:,d} dimensions, {tuned}"
    # Narrow models take more, but less than initial weights would.
    all_weights = rate_without_rise
    if width < measured_width:
        risen = base * (measured_width / width) ** NARROW_POWER
        risen = min(risen, MAX_NARROW_SHARE * initial)
        all_weights = max(rate_without_rise, risen)
    is_risen = all_weights > rate_without_rise

    if trained.what == "weights":
        rate = all_weights
        if steps > LONG_RUN_STEPS and not is_risen and not trained.has_logit_scale:
            reason += f", {steps:,d} steps"
            shortness = LONG_RUN_STEPS / min(steps, MAX_LONG_RUN_STEPS)
            rate = max(all_weights * shortness**0.25, MIN_RATE)
        return Decision(_two_digits(rate), f"all weights: {reason}")

    # One step of size lr in B changes the weights by (alpha / r) * lr * r directions of A, so the rank cancels out.
    # With rslora the factor is alpha / sqrt(r), and the root of the rank is left.
    strength = float(adapters.lora_alpha)
    if adapters.lora_variant == "rslora":
        strength *= math.sqrt(adapters.lora_r)
    alpha_factor = max(ADAPTER_ALPHA / strength, MIN_ALPHA_FACTOR)
    alpha_factor = min(alpha_factor, MAX_ALPHA_FACTOR)
    rate = math.sqrt(rate_without_rise * all_weights) * ADAPTER_RATIO * alpha_factor
    if steps < SHORT_RUN_OF_ADAPTERS:
        rate *= math.sqrt(SHORT_RUN_OF_ADAPTERS / max(steps, MIN_RUN_OF_ADAPTERS))
    return Decision(
        _two_digits(rate),
        f"LoRA of rank {adapters.lora_r}, alpha {adapters.lora_alpha}, {steps:,d} steps: {rate / all_weights:.3g} times "
        f"the rate of all weights, which is {_two_digits(all_weights):g} ({reason})",
    )


def _two_digits(value: float) -> float:
    """Round to two significant digits, as the log shows the rate."""
    return float(f"{value:.2g}")


def rate_of(optimizer: OptimizerSection) -> float:
    """Return the learning rate of a config in which it is decided."""
    assert optimizer.learning_rate != "auto", (
        "peak_rate decides it when the model is built"
    )
    return optimizer.learning_rate


# ---- epochs

EPOCHS_PER_ROOT = 200.0
"""n examples are seen 200 / sqrt(n) times: 4 times for 3,000, once for 30,000, and at most MAX_EPOCHS times."""
MAX_EPOCHS = 6
"""The ratios below multiply this limit too."""
MAX_EPOCHS_TWO_TOWERS = 12
"""The same for CLIP and SigLIP."""
FROM_SCRATCH_EPOCH_RATIO = 4
"""Epochs of initial weights, over those of trained ones."""
TWO_TOWERS_EPOCH_RATIO = 4
"""Epochs of CLIP and SigLIP, whose rate is low, over those of models of texts."""


def has_initial_weights(model: ModelSection) -> bool:
    """Return whether the config says that the weights are initial ones."""
    is_own_class = (
        model.model_class is not None and model.model_name == model.model_class
    )
    return model.from_scratch or is_own_class


def epochs_for(
    num_examples: int,
    *,
    from_scratch: bool = False,
    has_logit_scale: bool,
) -> float:
    """Return the passes over so many examples."""
    ratio = 1
    limit = MAX_EPOCHS
    if has_logit_scale:
        ratio = TWO_TOWERS_EPOCH_RATIO
        limit = MAX_EPOCHS_TWO_TOWERS
    if from_scratch:
        ratio *= FROM_SCRATCH_EPOCH_RATIO
    epochs = round(ratio * EPOCHS_PER_ROOT / math.sqrt(num_examples))
    return float(min(max(epochs, 1), ratio * limit))


def decide_epochs(
    optimizer: OptimizerSection,
    model: ModelSection,
    num_examples: int,
    *,
    has_logit_scale: bool,
) -> Decision[float]:
    """Return the passes over the data. `has_logit_scale`: see RateFacts."""
    if optimizer.epochs != "auto":
        return Decision(optimizer.epochs, "epochs")
    from_scratch = has_initial_weights(model)
    epochs = epochs_for(
        num_examples, from_scratch=from_scratch, has_logit_scale=has_logit_scale
    )
    if from_scratch:
        reason = f"from scratch: initial weights see {num_examples:,d} examples {epochs:g} times"
    elif epochs == 1:
        reason = f"{num_examples:,d} examples are enough for one pass"
    else:
        reason = f"{num_examples:,d} examples are few: each is seen {epochs:g} times"
        if has_logit_scale:
            reason += ", and two towers with a low rate need more"
    return Decision(epochs, reason)


def steps_of_epochs(
    epochs: float,
    batches_per_epoch: float,
    batches_per_step: int,
) -> int:
    """Return the optimizer steps of so many passes over the data, at least one."""
    steps = epochs * batches_per_epoch / batches_per_step
    # Rounded: in floats 1.1 * 50 is a little more than 55, which is no further step.
    return max(math.ceil(round(steps, 6)), 1)


# ---- intervals

MAX_EVALUATIONS = 10
MIN_EVALUATIONS = 3
MAX_EVALUATION_SHARE = 0.1
"""Share of a run's computation that its evaluations may take, beyond the fewest."""
SHORT_RUN_STEPS = 20
"""Shorter runs do nothing between their first and their last step."""
MIN_STEPS_FOR_CHECKPOINTS = 200
"""Length of a run without validation data from which it writes checkpoints."""
LARGE_CHECKPOINT_BYTES = 20e9
"""Larger checkpoints are written only if asked for."""
LOG_LINES_PER_RUN = 100
MAX_STEPS_PER_LOG_LINE = 50
AUTO_PATIENCE = 4


@dataclass(frozen=True)
class RunSize:
    """Facts about a run that its intervals depend on."""

    total_steps: int
    examples_per_step: int
    num_training: float
    """Texts and images of an example, on average."""
    num_evaluated: int
    """Texts and images of the evaluation data; 0 without them."""
    checkpoint_bytes: int
    is_length_given: bool
    """The user has said how many epochs or steps the run has."""


@dataclass(frozen=True)
class RunIntervals:
    """Steps between the recurring parts of a run."""

    eval_steps: int | None
    """None: only before and after training."""
    save_steps: int | None
    """None: only where the run is stopped."""
    logging_steps: int
    patience: int | None
    """Evaluations without a better score after which the run ends; None: it does not."""
    load_best_model_at_end: bool
    """True if `final/` holds the best evaluated checkpoint."""


def run_intervals(
    evaluation: EvaluationSection,
    run_options: RunSection,
    logging_steps: int | Literal["auto"],
    size: RunSize,
) -> tuple[RunIntervals, dict[str, str]]:
    """Return the intervals of a run: what the config gives, and for `auto` what suits the size of the run, with the reason
    by option."""
    has_validation = size.num_evaluated > 0
    reasons = {}
    steps = size.total_steps
    needs_checkpoints = (
        bool(evaluation.guards) or run_options.load_best_model_at_end is True
    )

    eval_steps = evaluation.eval_steps
    if eval_steps == "auto":
        eval_steps = None
        if has_validation:
            eval_steps, reasons["eval_steps"] = _auto_eval_steps(
                size, run_options.save_steps, is_needed=needs_checkpoints
            )

    save_steps = run_options.save_steps
    is_evaluated = has_validation and eval_steps is not None
    if save_steps == "auto":
        save_steps = None
        if size.checkpoint_bytes > LARGE_CHECKPOINT_BYTES and not needs_checkpoints:
            gigabytes = size.checkpoint_bytes / 1e9
            reasons["save_steps"] = (
                f"a checkpoint takes {gigabytes:,.0f} GB: give save_steps to write some"
            )
        elif is_evaluated and (steps >= SHORT_RUN_STEPS or needs_checkpoints):
            save_steps = eval_steps
            reasons["save_steps"] = (
                "a checkpoint at each evaluation, so that the best one is kept"
            )
        elif steps >= MIN_STEPS_FOR_CHECKPOINTS:
            save_steps = _round_down(steps // MAX_EVALUATIONS)
            reasons["save_steps"] = (
                f"about {MAX_EVALUATIONS} checkpoints in {steps:,d} steps"
            )

    keeps_best = run_options.load_best_model_at_end
    if keeps_best == "auto":
        keeps_best = False
        if has_validation and eval_steps is not None and save_steps is not None:
            if evaluation.guards:
                reason = "the guards decide which checkpoint final/ gets"
            elif save_steps % eval_steps:
                reason = (
                    f"save_steps: {save_steps:,d} is no multiple of eval_steps: {eval_steps:,d}, so that some "
                    "checkpoints have no score"
                )
            else:
                keeps_best = True
                reason = "there are validation data: final/ gets the checkpoint with the best score"
            reasons["load_best_model_at_end"] = reason

    if logging_steps == "auto":
        interval = min(max(steps // LOG_LINES_PER_RUN, 1), MAX_STEPS_PER_LOG_LINE)
        logging_steps = _round_down(interval)
        num_lines = math.ceil(steps / logging_steps)
        reasons["logging_steps"] = f"{num_lines:,d} lines for {steps:,d} steps"

    patience = evaluation.patience
    if patience == "auto":
        patience = None
        if is_evaluated and not size.is_length_given:
            patience = AUTO_PATIENCE
            reasons["patience"] = (
                "the run ends early where so many evaluations in a row find nothing better"
            )
    intervals = RunIntervals(
        eval_steps, save_steps, logging_steps, patience, keeps_best
    )
    return intervals, reasons


def _auto_eval_steps(
    size: RunSize,
    save_steps: Any,
    *,
    is_needed: bool,
) -> tuple[int | None, str]:
    """Return the interval of evaluations and the reason. `is_needed`: the config asks for evaluated checkpoints."""
    steps = size.total_steps
    if steps < SHORT_RUN_STEPS and not is_needed:
        return None, f"before and after a run of {steps:,d} steps"
    # Forward passes of an evaluation over those of the run. A backward pass counts as two.
    num_trained = steps * size.examples_per_step * size.num_training
    share = size.num_evaluated / (3 * num_trained)
    # Even the fewest evaluations would take longer than the training itself.
    if MIN_EVALUATIONS * share > 1 and not is_needed:
        reason = f"before and after training: one evaluation takes {share:.0%} of the computation"
        return None, reason
    num_affordable = max(MAX_EVALUATION_SHARE / share, MIN_EVALUATIONS)
    count = int(min(num_affordable, MAX_EVALUATIONS))
    interval = _round_down(max(steps // count, 1))
    if isinstance(save_steps, int) and (save_steps <= steps or is_needed):
        interval = save_steps  # each checkpoint needs a score
    num_evaluations = steps // interval
    reason = (
        f"{num_evaluations:,d} evaluations in {steps:,d} steps take about "
        f"{num_evaluations * share:.0%} of the computation"
    )
    return interval, reason


def _round_down(value: int) -> int:
    """Return the largest of 1, 2, 3, 4, 5, 6, 8 times a power of ten that is not above the value."""
    unit: int = 10 ** (len(str(value)) - 1)
    leading_digit = value // unit
    return unit * {7: 6, 9: 8}.get(leading_digit, leading_digit)
