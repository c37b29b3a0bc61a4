"""One memory model: what the budget measures and what `vembed plan` estimates lead to micro-batches by one function."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import vembed
from tests.built import described, model_of
from tests.tiny import shared, tiny_bert, tiny_qwen3
from tests.training.test_shortage import fail_at, without_dropout
from tests.training.tiny_run import config_for
from vembed.config.loading import resolve_run
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.models.embedding_model import EmbeddingModel
from vembed.parallel import step_memory
from vembed.parallel.devices import Gpu
from vembed.parallel.environment import RankInfo
from vembed.parallel.placement import place
from vembed.parallel.session import start_session
from vembed.parallel.step_memory import MemoryEstimate, halved, measure, tokens_of

GPU = Gpu("a stand-in", 1.0, None, None)


def placed(num_ranks=1, memory=2**30, **options):
    run = resolve_run(
        {
            "data_path": "unused",
            "model_name": str(shared(tiny_qwen3)),
            **options,
        }
    )
    ranks = RankInfo(0, num_ranks, 0, num_ranks)
    return place(run, ranks, torch.device("cuda", 0), memory, gpu=GPU)


def test_the_budget_reserved_nothing_for_the_optimizer_and_the_loss(
    monkeypatch,
):
    placement = placed(memory=2**27)
    config = placement.run.config
    size = measure(config)
    model = model_of(config)
    estimate = MemoryEstimate(placement, size)
    need = estimate.in_step()
    demand = estimate.demand()
    held = replace(demand, fixed=need.weights + need.copies + need.gradients)
    memory = (placement.memory, placement.memory)
    monkeypatch.setattr(step_memory, "measure_demand", lambda *_: held)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    session = SimpleNamespace(
        config=config,
        placement=placement,
        device=placement.device,
        fsdp=None,
        local_world_size=1,
    )
    longest = [SimpleNamespace(length=size.max_length)]
    featuriser = Featuriser(model.description)
    actual = step_memory.find_budget(config.batch, model, featuriser, session, longest)
    expected = tokens_of(placement, demand, size.max_length)
    assert (actual.micro_batch_tokens, actual.kept_graph_tokens) == expected
    # The optimizer's state is to come.
    _, without_state = tokens_of(placement, held, size.max_length)
    assert actual.kept_graph_tokens < without_state
    graphs = actual.kept_graph_tokens * held.per_token
    total = (
        need.weights
        + need.gradients
        + need.optimizer
        + need.copies
        + need.loss
        + graphs
    )
    assert total == pytest.approx(0.8 * placement.memory, rel=0.01)


def test_casts_of_weights_were_counted_as_activations(tmp_path, monkeypatch):
    config = config_for(
        tmp_path, model_name=str(shared(tiny_bert)), mixed_precision="bf16"
    )
    counted = {}
    with start_session(resolve_run(config)) as session:
        model = session.prepare(model_of(config, compute_dtype=torch.bfloat16))
        featuriser = Featuriser(described(config))
        sample = featuriser.features([(Item("red green house river " * 3), "document")])
        for tokens in (1, 1024):  # a single text is longer than 1
            monkeypatch.setattr(step_memory, "PROBE_TOKENS", tokens)
            counted[tokens] = step_memory.bytes_per_token(
                model, featuriser, session, sample
            )
    # What one token adds, whatever the number of tokens.
    assert counted[1] == pytest.approx(counted[1024], rel=0.1)


def test_the_measured_graph_was_never_freed(tmp_path):
    config = config_for(tmp_path, model_name=str(shared(tiny_bert)))
    with start_session(resolve_run(config)) as session:
        model = session.prepare(model_of(config))
        remaining = weakref.ref(next(model.parameters()))
        featuriser = Featuriser(described(config))
        sample = featuriser.features([(Item("red green house river"), "document")])
        assert step_memory.bytes_per_token(model, featuriser, session, sample) > 0
    del model, session
    gc.collect()
    assert remaining() is None, "a graph holds the weights"


def test_recomputation_is_on_under_fsdp_unless_memory_is_enough():
    small = 90 * 2**20
    decisions = {
        (2**30, "fsdp"): (False, "the graphs of a batch fit"),
        (small, "fsdp"): (True, "without it only"),
        (small, "ddp"): (False, "default without FSDP"),
    }
    for (memory, strategy), (value, reason) in decisions.items():
        built = placed(8, memory=memory, strategy=strategy).recomputation
        assert built.value is value and reason in built.reason
    large_batch = placed(8, strategy="fsdp", batch_size=2048).recomputation
    assert not large_batch.value and "Gradient Cache bounds" in large_batch.reason
    assert placed(8, strategy="fsdp", gradient_checkpointing=True).recomputation.value
    for options in ({"use_gradient_cache": False, "batch_size": 2048}, {}):
        chosen = placed(8, memory=2**19, **options)
        asked = placed(
            8,
            memory=2**19,
            strategy="fsdp",
            **options,
        )
        assert chosen.strategy.value == "fsdp", "strategy: auto decides alike"
        assert chosen.recomputation == asked.recomputation
        assert chosen.recomputation.value


def test_a_failed_attempt_kept_its_outputs_while_memory_was_emptied(
    tmp_path, monkeypatch
):
    fail_at(monkeypatch, {3})
    forward = EmbeddingModel.forward
    outputs = []
    alive = []

    def watched(self, parts, **options):
        actual = forward(self, parts, **options)
        outputs.extend(weakref.ref(entry) for entry in actual)
        return actual

    def counted(session, budget):
        alive.append(sum(output() is not None for output in outputs))
        return halved(session, budget)

    monkeypatch.setattr(EmbeddingModel, "forward", watched)
    monkeypatch.setattr("vembed.training.trainer.halved", counted)
    vembed.train(without_dropout(tmp_path, max_steps=1, use_gradient_cache=False))
    assert alive == [0] and len(outputs) > 2
