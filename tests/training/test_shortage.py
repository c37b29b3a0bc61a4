"""Running out of device memory: the step is replayed with a smaller budget, and the result is the same."""

import itertools
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import vembed
from tests.harness import STRATEGIES, rank_outcomes, result_of, run_cases, run_ranks
from tests.tiny import shared, tiny_bert
from tests.training.test_run import (
    log_text,
    metrics,
    settings_without_validation,
)
from tests.training.tiny_run import config_for
from vembed.cli.support import _LOST_RANK
from vembed.config.decisions import FsdpConfig
from vembed.config.loading import resolve_run
from vembed.config.schema import TrainConfig
from vembed.errors import RunError
from vembed.losses.build import TermModule
from vembed.models.embedding_model import EmbeddingModel
from vembed.parallel.devices import GPUS, is_shortage
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place
from vembed.parallel.step_memory import Budget, advice, find_budget

H100 = next(gpu for gpu in GPUS if gpu.name == "H100-80GB")
SMALLER = "micro-batches of 200 tokens instead of 400"


def fail_at(monkeypatch, micro_batches, *, above_rows=0):
    """The model's forward runs out of memory at these calls in training, or whenever it gets many rows."""
    original = EmbeddingModel.forward
    count = [0]
    # In turns as torch's allocator says it, and as a library that allocates by itself. Each is made anew: an error
    # holds the frames that it came through, and their tensors.
    errors = itertools.cycle(
        [
            lambda: torch.OutOfMemoryError("CUDA out of memory (simulated)"),
            lambda: RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
        ]
    )

    def forward(self, parts, **options):
        if self.training:
            count[0] += 1
            if count[0] in micro_batches or (
                above_rows and len(parts[0][1]["input_ids"]) > above_rows
            ):
                raise next(errors)()
        return original(self, parts, **options)

    monkeypatch.setattr(EmbeddingModel, "forward", forward)


@pytest.mark.parametrize(
    ("padded_tokens", "longest", "num_kept"),
    [(500, 90, 7), (501, 90, 5), (501, 130, 3), (2000, 600, 0)],
)
def test_graphs_of_as_many_micro_batches_as_fit_are_kept(
    padded_tokens, longest, num_kept
):
    # A single input of 130 or 600 tokens is larger than a micro-batch.
    session = SimpleNamespace(fsdp=None)
    budget = Budget(100, 500, use_gradient_cache=None)
    assert budget.num_kept_graphs(padded_tokens, longest, 7, session) == num_kept


def without_dropout(folder, **more):
    """Options of a short run without validation data."""
    options = settings_without_validation(folder, max_steps=3)
    options["micro_batch_tokens"] = 400
    options["gradient_accumulation_steps"] = 2
    return options | more


@pytest.mark.parametrize(
    ("version", "cache", "num_kept"), [(1, False, 0), (1, True, 0), (2, False, 2)]
)
def test_fsdp1_says_that_it_cannot_keep_several_graphs(
    version, cache, num_kept, tmp_path, caplog
):
    options = config_for(tmp_path, use_gradient_cache=cache, micro_batch_tokens=100)
    fsdp = FsdpConfig(version=version)
    session = SimpleNamespace(fsdp=fsdp, device=torch.device("cpu"))
    budget = find_budget(options.batch, None, None, session, [])
    assert budget.num_kept_graphs(50, 30, 2, session) == num_kept
    assert budget.num_kept_graphs(50, 30, 1, session) == int(not cache)
    is_said = "use_gradient_cache: false holds only for" in caplog.text
    assert is_said == (version == 1 and not cache)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.promise("A15")
def test_step_is_replayed_with_half_the_budget(cache, tmp_path, monkeypatch):
    common = without_dropout(tmp_path, max_steps=4, use_gradient_cache=cache)
    plain = vembed.train({**common, "output_dir": str(tmp_path / "plain")})
    with monkeypatch.context() as patch:
        # In the first and in the second phase, in the first and in the second batch of a step.
        fail_at(patch, {3, 11, 19})
        short = vembed.train({**common, "output_dir": str(tmp_path / "short")})
    expected = metrics(plain.output_dir)
    assert metrics(short.output_dir) == pytest.approx(expected, rel=1e-5)
    assert SMALLER in log_text(short.output_dir)


def two_ranks(folder, failing_calls, **options):
    """Train on a rank of two, of which rank 1 runs out of memory at some calls of the model. Return the losses."""
    output = str(folder / f"run-{len(failing_calls)}")
    options = without_dropout(folder, output_dir=output, **options)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            fail_at(patch, failing_calls)
        vembed.train({**options, "use_gradient_cache": True})
    return metrics(output)


@pytest.fixture(scope="module")
def plain_and_short(tmp_path_factory):
    """The losses where nothing runs out of memory, and where one rank does."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = {"plain": (folder, set()), "short": (folder, {3, 11, 19})}
    results = run_cases(two_ranks, 2, cases)
    return [result_of(results, name)[0] for name in cases]


@pytest.fixture
def plain(plain_and_short):
    return plain_and_short[0]


def test_a_shortage_of_one_rank_is_known_to_all(plain_and_short):
    plain, short = plain_and_short
    assert short == pytest.approx(plain, rel=1e-5)


def test_a_shortage_between_shared_batch_norms_ends_all_ranks(tmp_path):
    """Its neighbour may be inside the model, where a batch norm waits for this rank: nothing can tell it to repeat."""
    (neighbour, short) = rank_outcomes(
        partial(two_ranks, sync_batchnorm=True), 2, tmp_path, {3}
    )
    assert "RunError: rank 1 of 2 is out of device memory" in short.error
    assert _LOST_RANK.search(neighbour.error)


def two_ranks_with_short_loss(folder, strategy, cache):
    """Train on a rank of two, of which rank 1 runs out of memory in its second loss. Return the losses of the steps and
    the log."""
    loss = TermModule.forward
    count = [0]

    def forward(self, batch):
        count[0] += 1
        if os.environ["RANK"] == "1" and count[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return loss(self, batch)

    options = without_dropout(folder, use_gradient_cache=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TermModule, "forward", forward)
        output = vembed.train({**options, **STRATEGIES[strategy]}).output_dir
    return metrics(output), log_text(output)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_without_memory_is_repeated_with_fewer_graphs(strategy, plain, tmp_path):
    (short, _) = run_ranks(two_ranks_with_short_loss, 2, tmp_path, strategy, "auto")
    losses, log = short
    assert losses == pytest.approx(plain, rel=1e-5)
    assert SMALLER in log


@pytest.mark.parametrize("cache", [True, False])
def test_a_loss_that_no_smaller_budget_helps_ends_all_ranks(cache, tmp_path):
    """With Gradient Cache no graph is kept beside the loss. Without it, all are, whatever the budget."""
    (neighbour, short) = rank_outcomes(
        two_ranks_with_short_loss, 2, tmp_path, "ddp", cache
    )
    assert "RunError: rank 1 of 2 is out of device memory in the loss" in short.error
    assert "batch_size: 8" in short.error and "micro_batch_tokens:" not in short.error
    assert ("use_gradient_cache: true" in short.error) == (not cache)
    # Its neighbour waits in a collective, and ends with it.
    assert _LOST_RANK.search(neighbour.error)


def test_other_errors_are_no_shortage():
    assert not is_shortage(
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"
        )
    )
    assert is_shortage(RuntimeError("CUDA error: out of memory"))


@pytest.mark.promise("D26")
def test_no_budget_is_small_enough(tmp_path, monkeypatch):
    fail_at(monkeypatch, set(range(1, 100)))
    options = without_dropout(tmp_path, use_gradient_cache=False)
    with pytest.raises(RunError, match=r"memory .*micro_batch_tokens.*use_lora: true"):
        vembed.train(options)


GATHERED = {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}


@pytest.mark.parametrize(
    ("options", "expected", "absent"),
    [
        ({"fsdp_version": 1}, "fsdp_offload_params: true", "adamw_8bit"),
        ({}, "optim: adamw_8bit", "fsdp_sharding_strategy"),
        (GATHERED, "fsdp_sharding_strategy: FULL_SHARD", "use_fsdp"),
        ({"strategy": "ddp"}, "use_fsdp: true", "fsdp_sharding_strategy"),
        ({"fsdp_offload_params": True}, "use_lora: true", "fsdp_offload_params"),
        ({"use_lora": True}, "use_qlora: true", "use_lora"),
        ({"gradient_checkpointing": False}, "gradient_checkpointing: true", "use_fsdp"),
    ],
    ids=str,
)
def test_the_advice_knows_what_is_on_and_what_does_not_go_there(
    options, expected, absent
):
    values = {"strategy": "fsdp", **options}
    config = TrainConfig(model_name=str(shared(tiny_bert)), data_path="-", **values)
    ranks = RankInfo(0, 2, 0, 2)
    run = resolve_run(config, env={})
    placement = place(run, ranks, torch.device("cuda"), H100.memory, gpu=H100)
    session = SimpleNamespace(
        placement=placement,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        strategy=placement.strategy.value,
        keeps_gathered=placement.keeps_gathered(1.0),
    )
    said = advice(session, Budget(8192, 8192, None))
    assert expected in said and absent not in said
    assert "micro_batch_tokens: 4096 (now 8,192)" in said
