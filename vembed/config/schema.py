"""TrainConfig: every option of a run once, with its type, default, unit and how it acts together with others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: Any) -> Any:
    """Python counts true as 1; an option that wants a number does not."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Number = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(gt=0, lt=2**63), Number]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False), Number]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False), Number]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), Number]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), Number]
Dtype = Literal["float32", "bfloat16", "float16"]
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.005, 1.0
"""What a learned temperature is kept within."""


class Frozen(BaseModel):
    """Base of all config models: immutable, and a key that nobody declared is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # run_name: 2024 is a name
    )


class DataSource(Frozen):
    """One entry of `data_path` when it is a list."""

    path: str
    """A file (JSONL, CSV, TSV, Parquet), a folder saved by `datasets`, or a Hub dataset name."""
    weight: PositiveFloat = 1.0
    """How often its examples are drawn, relative to the other sources; 1 draws each example once per epoch."""
    name: str | None = None
    """What logs call it; by default the path."""
    column_mapping: dict[str, str] | None = None
    """As the option of the same name, for this source alone."""


class TrainConfig(Frozen):
    """A run. The text under each field is its documentation; `docs/options.md` is generated from it."""

    # ---- model -------------------------------------------------------------------------------------------------
    model_name: str
    """The model to start from: a Hub name or a local folder (Transformers or Sentence Transformers layout)."""
    model_family: Literal[
        "auto", "text_encoder", "text_decoder", "clip", "siglip", "image_encoder", "vision_language", "composed"
    ] = "auto"
    """What kind of model it is. `auto` reads the model's config and files, and the log gives the reason."""
    model_revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that a model's folder brings along. Only for models that you trust as you trust your own code."""
    image_model_name: str | None = None
    """A second tower for images: `model_name` encodes text, this one images (model_family: composed)."""
    composed_dim: PositiveInt | None = None
    """Size of the shared space of a composed model. Default: the smaller of the two towers' sizes."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which weights are loaded. Trainable weights are held as float32 masters whatever it says, unless
    `pure_dtype: true`. `auto`: float32 for what is trained, the file's own dtype for what is frozen."""
    pure_dtype: bool = False
    """Keep trainable weights in `torch_dtype` too (no float32 masters): half the memory, worse convergence."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Dtype of the arithmetic. `auto`: bf16 on GPUs that have it, otherwise no. The loss is always float32."""
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention kernel. `auto`: flash-attn where it is installed and the GPU allows, otherwise sdpa."""
    padding_free: Literal["auto"] | bool = "auto"
    """Put the texts of a micro-batch through the model end to end, without their padding. `auto`: for the models and
    kernels that can; `true`: or stop and say why not."""
    bidirectional_attention: bool = False
    """For decoder-only models: let every token see every other one (no causal mask)."""
    max_length: PositiveInt | None = None
    """Longest text in tokens; longer ones are cut. Default: the model's own limit, at most 512."""
    pooling: Literal["auto", "cls", "mean", "last", "weighted_mean", "max"] = "auto"
    """How token vectors become one. `auto`: from the model's own files, otherwise by family."""
    query_prompt: str | None = None
    """Text put before every query. Default: the model's own; an empty string means none."""
    document_prompt: str | None = None
    """Text put before every document. Default: the model's own; an empty string means none."""
    min_pixels: PositiveInt | None = None
    """Vision-language models: smallest image area in pixels; smaller images are enlarged. Default: the model's own."""
    max_pixels: PositiveInt | None = None
    """Vision-language models: largest image area in pixels; larger images are reduced. Default: the model's own."""
    torch_compile: bool = False
    """Compile the backbone's layers; pays on GPUs in long runs."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. Default: true with
    `use_fsdp: true`, otherwise false."""

    # ---- head --------------------------------------------------------------------------------------------------
    use_mrl: bool = False
    """Matryoshka training: the loss counts at every size in `mrl_dims`, each the first coordinates of the embedding."""
    mrl_dims: list[PositiveInt] | None = None
    """Sizes to train. Default with use_mrl: the embedding's size and its halves down to 64."""
    mrl_weights: list[PositiveFloat] | None = None
    """Weight of each size in the loss, in the order of `mrl_dims`. Default: 1 for each."""
    mrl_projection: Literal["auto"] | bool = "auto"
    """A linear layer from the hidden size to max(mrl_dims). `auto`: only where max(mrl_dims) is smaller."""
    mrl_projection_init: Literal["identity", "pca"] = "identity"
    """Start of that layer: the identity's first rows, or the principal components of a sample of the training data."""

    # ---- adapters and frozen parts -----------------------------------------------------------------------------
    use_lora: bool = False
    """Train low-rank adapters instead of the weights."""
    lora_r: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: PositiveInt = 32
    """Scale of the adapters; the update counts alpha / r times."""
    lora_dropout: Fraction = 0.05
    """Dropout inside the adapters."""
    lora_target_modules: Literal["auto", "all-linear"] | list[str] = "auto"
    """Layers that get an adapter. `auto`: attention and feed-forward projections of the chosen towers."""
    lora_towers: Literal["text", "vision", "all"] = "all"
    """Towers that get adapters; the others are frozen."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r), which suits large ranks."""
    use_dora: bool = False
    """Weight-decomposed adapters: slower, often better at small ranks."""
    use_qlora: bool = False
    """Hold the frozen weights in 4 bits (nf4) under the adapters; implies `use_lora`. Needs bitsandbytes."""
    save_merged: bool = True
    """After a LoRA run, `final/` holds the merged model, and the adapter beside it. false: the adapter alone."""
    freeze: list[str] = Field(default_factory=list)
    """Parts not to train: `text`, `vision`, `embeddings`, `first_n_layers=6`, or prefixes of parameter names."""

    # ---- data --------------------------------------------------------------------------------------------------
    data_path: str | list[str | DataSource]
    """Training data: a file (JSONL, CSV, TSV, Parquet), a `datasets` folder, a Hub name, or a list with weights."""
    val_data_path: str | None = None
    """Validation data: as `data_path`, or a BEIR-style folder (corpus.jsonl, queries.jsonl, qrels/*.tsv)."""
    column_mapping: dict[str, str] | None = None
    """Names in your file -> names that vembed reads, e.g. {question: query, answer: positive}."""
    retrieval_mode: Literal["auto", "t2t", "t2i", "i2t", "i2i", "m2i", "m2t"] = "auto"
    """What plain strings are: t text, i image path, m a record with both; query 2 document. `auto`: plain strings are
    text, and images are written as {"image": path}."""
    image_root: str | None = None
    """Folder that relative image paths start from, and must stay in. Default: the folder of the data file."""
    allow_image_urls: bool = False
    """Fetch images from http(s) addresses."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A record that cannot be used: stop before training and list the first ten, or leave it out and count it."""
    max_negatives: NonNegativeInt | None = None
    """Use at most so many of a record's negatives. Default: all."""
    max_train_examples: PositiveInt | None = None
    """Use only the first so many examples of the training data."""
    no_duplicates: bool = False
    """Keep equal texts out of one global batch; an example that would bring one waits for a later batch."""
    homogeneous_batches: bool = False
    """With several sources: draw every global batch from one of them."""
    num_workers: Literal["auto"] | NonNegativeInt = "auto"
    """Threads that prepare features ahead of the step. `auto`: 1 for text, up to 4 with images; 0: none."""

    # ---- loss --------------------------------------------------------------------------------------------------
    loss: Literal["infonce", "cosent", "cosine", "triplet", "sigmoid"] = "infonce"
    """infonce: pairs with in-batch negatives. cosent, cosine: pairs with scores. triplet: given negatives with a
    margin. sigmoid: SigLIP's pairwise loss with learned scale and bias."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """How two embeddings are compared, in the loss, the evaluation and the saved model."""
    temperature: PositiveFloat = 0.05
    """Similarities are divided by it. Smaller: harder."""
    learn_temperature: bool = False
    """Learn the temperature, starting at `temperature`, kept within [0.005, 1]."""
    bidirectional: bool = False
    """Also score each positive against all queries; the loss is the mean of both directions."""
    query_query_negatives: bool = False
    """Also count the other queries of the batch as negatives of a query."""
    document_document_negatives: bool = False
    """Also count the other documents of the batch as negatives of a positive document."""
    false_negative_margin: Annotated[float, Field(allow_inf_nan=False), Number] | None = None
    """Leave out candidates that score above the positive's score plus this margin. Default: none is left out."""
    mask_duplicates: bool = True
    """Leave out candidates whose content equals one of the row's positives or its query."""
    hard_negatives_scope: Literal["all", "own"] = "all"
    """Whether a row's hard negatives count as candidates for all rows of the batch or for their own row alone."""
    negatives_from: Literal["all_ranks", "own_rank"] = "all_ranks"
    """Whether candidates come from the whole global batch or from the process's own share."""
    triplet_margin: NonNegativeFloat = 0.2
    """loss: triplet: how much closer the positive has to be than the negative."""

    # ---- batch and step ----------------------------------------------------------------------------------------
    batch_size: PositiveInt = 32
    """Examples per process and step."""
    global_batch_size: PositiveInt | None = None
    """Examples per step over all processes; instead of `batch_size`."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches per optimizer step. Each has its own negatives: for a larger contrastive batch raise `batch_size`,
    whose memory is bounded by `micro_batch_tokens`."""
    micro_batch_tokens: Literal["auto"] | PositiveInt = "auto"
    """Padded tokens (and image patches) that go through the model at once. Changes memory and speed, not the result."""
    gradient_cache_chunk_size: PositiveInt | None = None
    """Rows that go through the model at once: the other way to say `micro_batch_tokens`."""
    use_gradient_cache: Literal["auto"] | bool = "auto"
    """Run every micro-batch twice and keep no graphs between: memory stays that of one micro-batch. `auto`: only where
    the batch is larger than `kept_graph_tokens`. The gradient is the same either way."""
    kept_graph_tokens: Literal["auto"] | PositiveInt = "auto"
    """Padded tokens whose graphs fit in memory at once. `auto`: from the memory there is."""
    cache_frozen_features: bool = False
    """Keep what a frozen tower gives for each input in vembed's cache folder: it passes the tower once, in whatever
    epoch or run. Needs a tower of which nothing is trained (`freeze`, `lora_towers`)."""

    # ---- optimisation ------------------------------------------------------------------------------------------
    epochs: PositiveFloat = 1.0
    """Passes over the data; may be a fraction. `max_steps` wins."""
    max_steps: PositiveInt | None = None
    """Optimizer steps. Default: from `epochs`."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate. It is used as it stands, on any number of processes."""
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by global batch / `base_batch_size` (or its square root); the log shows the result."""
    base_batch_size: PositiveInt = 32
    """The global batch that `learning_rate` was chosen for; only with `scale_learning_rate`."""
    optim: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"] = "adamw"
    """Optimizer. The 8-bit ones hold their state in a quarter of the memory."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not on biases and norms."""
    adam_beta1: Momentum = 0.9
    """Decay of the first moment."""
    adam_beta2: Momentum = 0.999
    """Decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Term that keeps the division stable."""
    head_learning_rate: PositiveFloat | None = None
    """Learning rate of heads, projections and learned scales. Default: `learning_rate`."""
    layer_lr_decay: Annotated[float, Field(gt=0.0, le=1.0), Number] = 1.0
    """Each layer below the last one learns by this factor less."""
    warmup_ratio: Fraction = 0.1
    """Share of all steps in which the learning rate rises to its peak."""
    warmup_steps: NonNegativeInt | None = None
    """The same in steps; instead of `warmup_ratio`."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up (constant: not at all)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients longer than this (global norm) are shortened to it; 0 turns clipping off."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not a number: stop after naming the examples, or leave that step out and count it."""
    seed: NonNegativeInt = 42
    """Seed of data order, new weights and dropout."""
    deterministic: bool = False
    """Ask torch for deterministic kernels on GPUs; slower."""

    # ---- distributed -------------------------------------------------------------------------------------------
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """How processes share the model: ddp, a copy on each; fsdp, sharded. `auto` chooses by size, and says why."""
    use_fsdp: bool = False
    """The same as `strategy: fsdp`, with the options of `configs/accelerate_fsdp.yaml`."""
    accelerate_config: str | None = None
    """Accelerate YAML or the name of a preset (accelerate_fsdp, accelerate_ddp, ...). What `accelerate launch` sets
    wins."""
    num_processes: Literal["auto"] | PositiveInt = "auto"
    """Processes per machine that `vembed train` starts (also `devices`). `auto`: one per GPU, 1 without."""
    num_machines: PositiveInt = 1
    """Machines that take part (also `num_nodes`)."""
    fsdp_version: Literal[1, 2] | None = None
    """FSDP implementation. Default: the preset's, 2."""
    fsdp_sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None = None
    """What is sharded. FULL_SHARD: parameters, gradients, optimizer; SHARD_GRAD_OP: parameters stay whole between
    forward and backward; NO_SHARD: plain DDP; HYBRID_SHARD: sharded inside a machine, copied between machines."""
    fsdp_offload_params: bool | None = None
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    fsdp_cpu_offload: bool | None = None
    """Another name for `fsdp_offload_params`; the two must not contradict each other."""
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None = None
    """What becomes a unit: each transformer layer, each module above `fsdp_min_num_params`, or the whole model."""
    fsdp_transformer_layer_cls_to_wrap: str | list[str] | None = None
    """Layer classes (name, dotted path, or a list). Default: those that the backbone declares."""
    fsdp_min_num_params: NonNegativeInt | None = None
    """With SIZE_BASED_WRAP: smallest module that becomes a unit, in parameters. 0 or none: 1,000,000."""
    fsdp_wrap_embeddings: bool = True
    """Make input embeddings a unit of their own, trained or frozen, with TRANSFORMER_BASED_WRAP. It has no effect under
    the other policies."""
    fsdp_reshard_after_forward: bool | None = None
    """FSDP2: free the gathered parameters after the forward pass. Default: from the sharding strategy, and in training
    not before the end of a step where whole parameters take at most a fifth of a process's memory."""
    fsdp_backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = None
    """FSDP1 only: when the next unit is gathered in the backward pass. FSDP2 prefetches by itself."""
    fsdp_forward_prefetch: bool | None = None
    """Gather the next unit before the current one has finished its forward pass."""
    fsdp_limit_all_gathers: bool | None = None
    """FSDP1 only: limit gathers in flight. FSDP2 bounds them by itself."""
    fsdp_use_orig_params: bool | None = None
    """FSDP1 only: keep the original parameters visible (needed for LoRA). FSDP2 always does."""
    fsdp_activation_checkpointing: bool | None = None
    """Another name for `gradient_checkpointing`; the two must not contradict each other."""
    fsdp_state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"] | None = None
    """How checkpoints are written under FSDP. LOCAL_STATE_DICT exists in FSDP1 alone."""
    fsdp_cpu_ram_efficient_loading: bool | None = None
    """Only the first process reads the weights and hands them out."""
    fsdp_sync_module_states: bool | None = None
    """FSDP1: copy the weights of the first process to all at the start."""
    fsdp_mixed_precision: bool | None = None
    """false: FSDP's arithmetic in the dtype of the parameters, whatever `mixed_precision` says."""
    fsdp_param_dtype: Dtype | None = None
    """Dtype of the gathered parameters and so of the arithmetic. Default: from `mixed_precision`."""
    fsdp_reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced. Default: float32."""
    fsdp_buffer_dtype: Dtype | None = None
    """FSDP1 only: dtype of buffers. FSDP2 has fsdp_output_dtype instead."""
    fsdp_output_dtype: Dtype | None = None
    """FSDP2 only: dtype of the model's output. Default: float32."""
    sync_batchnorm: bool = False
    """Turn batch norms into ones that share statistics among processes."""
    dist_timeout_minutes: PositiveFloat = 30.0
    """How long a collective waits for the other processes before the run fails with a message."""

    # ---- evaluation, logging, saving ---------------------------------------------------------------------------
    output_dir: str = "output"
    """Folder of the run: settings, logs, checkpoints, model and report."""
    eval_steps: PositiveInt | None = None
    """Evaluate every so many steps. Default: only before and after training."""
    eval_before: bool = True
    """Evaluate before the first step, so that the report can compare."""
    eval_metric: str = "auto"
    """What decides the best checkpoint. `auto`: ndcg@10 for retrieval, spearman for scored pairs."""
    eval_ks: list[PositiveInt] = Field(default_factory=lambda: [1, 5, 10, 100])
    """Cut-offs of nDCG, MRR, Recall and MAP."""
    eval_batch_tokens: Literal["auto"] | PositiveInt = "auto"
    """Padded tokens that go through the model at once in evaluation."""
    save_steps: PositiveInt | None = None
    """Write a checkpoint every so many steps. Default: none before the end."""
    save_total_limit: PositiveInt | None = 3
    """Keep so many checkpoints; the best and the newest always stay."""
    load_best_model_at_end: bool = False
    """`final/` holds the best evaluated checkpoint instead of the last weights; needs eval_steps and save_steps."""
    async_save: bool = False
    """Write checkpoints while training goes on."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """A checkpoint that cannot be written (disk full): end with exit code 1, or go on with the last good one."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights in `final/`. `auto`: that of the model's own files, although training holds float32."""
    logging_steps: PositiveInt = 10
    """Write a log line and a line of metrics.jsonl every so many steps."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers; `none` for no tracker."""
    run_name: str | None = None
    """Name of the run in trackers. Default: the name of output_dir."""
    wandb_project: str = "vembed"
    """Project in wandb or trackio."""
    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the run in wandb."""
    log_file: str = "training_log.txt"
    """Log file, inside output_dir."""
    debug: bool = False
    """Log every process to logs/rank-<r>.log in detail, and set TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    profile_steps: list[PositiveInt] | None = None
    """[first, last]: write a trace of these steps per process (trace-rank<r>.json)."""
    resume: Literal["auto"] | bool | str = False
    """true: continue from the newest good checkpoint of output_dir; auto: the same where there is one; or a path."""
    resume_anyway: bool = False
    """Resume although model, data, batch or seed have changed."""
    max_train_minutes: PositiveFloat | None = None
    """Save and end in good time before so many minutes have passed."""

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values, as they are written to config.yaml."""
        return self.model_dump(mode="json")
