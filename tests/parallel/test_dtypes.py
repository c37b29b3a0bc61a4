"""Dtypes that FSDP takes, what is converted and what is said; the parameter summary; LoRA, bf16, weights read once."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.harness import result_of, run_cases, run_ranks
from tests.parallel.steps import (
    REDUCE_SCATTER,
    build,
    config_of,
    listen,
    parts_of,
    prepared,
    sharded_step,
    share_of_loss,
    whole_step,
)
from tests.tiny import shared, tiny_bert
from vembed.parallel import parameters
from vembed.parallel.session import start_session


@pytest.fixture
def lines():
    return listen()


def mixed():
    """A frozen bfloat16 base under float32 adapters and a bfloat16 head that is trained."""
    base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
    head = nn.Linear(2, 2).to(torch.bfloat16)
    return nn.ModuleDict({"base": base, "adapter": nn.Linear(4, 2), "head": head})


@pytest.mark.promise("D36")
def test_uniform_dtype_is_said_in_the_documents_words(lines):
    model = nn.Linear(2, 2).to(torch.bfloat16)
    assert parameters.unify_model_dtype_for_fsdp(model) == 0
    assert lines == ["FSDP dtype check: all parameters already in torch.bfloat16"]


@pytest.mark.parametrize(
    ("version", "converted", "small"),
    [(1, "4 parameters (26 values)", ()), (2, "2 parameters (6 values)", ("base",))],
)
@pytest.mark.promise("D29")
def test_masters_are_never_downcast_and_fsdp1_needs_one_dtype_for_all(
    lines, version, converted, small
):
    model = mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters.unify_model_dtype_for_fsdp(model, fsdp_version=version)
    assert f"converted {converted} from torch.bfloat16 to torch.float32" in lines[0]
    for name, value in model.state_dict().items():
        is_half = value.dtype == torch.bfloat16
        assert is_half == name.startswith(small), name
        assert torch.equal(value.to(before[name].dtype), before[name])


@pytest.mark.promise("D37")
def test_parameter_summary_has_the_documents_words(lines):
    with torch.device("meta"):
        model = nn.Linear(4096, 2_000_000, bias=False)
    model.extra = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
    parameters.log_parameter_summary(model)
    assert lines == [
        "FSDP parameter summary:",
        "  Total: 8,192,000,000 (8.19B)",
        "  Trainable: 8,192,000,000 (8.19B)",
        "  Frozen: 0 (0.00B)",
    ]


# ---- LoRA over a frozen bfloat16 base --------------------------------------------------------------------------------


def add_lora(model):
    torch.manual_seed(3)
    adapters = LoraConfig(
        r=4, target_modules=["query", "value"], init_lora_weights=False
    )
    model.backbone = get_peft_model(model.backbone.to(torch.bfloat16), adapters)
    for parameter in model.backbone.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def config_here(**options):
    folder = shared(tiny_bert, layers=3)
    return config_of(folder, gradient_checkpointing=False, **options)


def on_two_ranks(function, cases):
    """Each case's results by rank, in one start of the ranks. `cases`: name -> argument of the function."""
    arguments = {name: (argument,) for name, argument in cases.items()}
    return run_cases(function, 2, arguments)


def lora_step(version):
    options = {"strategy": "fsdp", "fsdp_version": version}
    return sharded_step(config_here(**options), dtype=torch.float32, edit=add_lora)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.promise("D23", "D29", "D37")
def test_lora_trains_adapters_alone_over_a_frozen_base():
    frozen_dtypes = {1: torch.float32, 2: torch.bfloat16}
    results = on_two_ranks(lora_step, {1: 1, 2: 2})
    whole = whole_step(config_here(), 2, dtype=torch.float32, edit=add_lora)
    for version, frozen in frozen_dtypes.items():
        first, second = result_of(results, version)
        assert first.dtypes == {(torch.float32, True), (frozen, False)}
        assert first.summary == whole.summary
        trainable = first.summary["trainable"]
        assert trainable < first.summary["total"]
        assert f"  Trainable: {trainable:,d} (0.00B)" in first.lines
        assert first.with_gradient
        assert all("lora_" in name for name in first.with_gradient)
        # The base computes in bfloat16 under FSDP2.
        assert first.norm == pytest.approx(whole.norm, rel=0.02)
        assert first.norm == second.norm
        for name, value in whole.weights.items():
            if "lora_" not in name:
                assert torch.equal(first.weights[name].to(value.dtype), value), name


# ---- precision -------------------------------------------------------------------------------------------------------


def seen_in_bf16(options):
    """Dtypes of a step: of layers' outputs, of what is reduced, of weights and gradients."""
    reduced = set()
    computed = []
    original = getattr(dist, REDUCE_SCATTER)

    def reduce_scatter(*args, **more):
        for tensor in (*args, *more.values()):
            if isinstance(tensor, Tensor):
                reduced.add(tensor.dtype)
        return original(*args, **more)

    def note(module, args, output):
        hidden = output if isinstance(output, Tensor) else output[0]
        computed.append(hidden.dtype)

    config = config_here(strategy="fsdp", mixed_precision="bf16", **options)
    with pytest.MonkeyPatch.context() as patch, start_session(config) as session:
        patch.setattr(dist, REDUCE_SCATTER, reduce_scatter)
        config = session.placement.run.config
        model, featuriser = prepared(session, config, dtype=torch.float32)
        for module in model.modules():
            if type(module).__name__.removeprefix("FSDP") == "BertLayer":
                module.register_forward_hook(note)
        (output,) = model(parts_of(featuriser, session.rank, 0))
        output.sum().backward()
        masters = parameters.full_state_dict(model).values()
        gradients = [weight.grad for weight in model.parameters()]
        return {
            "reduced in": reduced,
            "computed in": computed,
            "output": {output.dtype},
            "masters": {master.dtype for master in masters},
            "gradients": {grad.dtype for grad in gradients if grad is not None},
        }


@pytest.mark.promise("B13", "C23", "D15", "E13", "E17")
def test_bf16_computes_in_bf16_and_keeps_float32_masters():
    cases = {
        "fsdp1": {"fsdp_version": 1},
        "fsdp2": {},
        "reduced": {"fsdp_reduce_dtype": "bfloat16"},
    }
    results = on_two_ranks(seen_in_bf16, cases)
    for name in cases:
        dtypes, _ = result_of(results, name)
        is_reduced = name == "reduced"
        assert dtypes == {
            "reduced in": {torch.bfloat16 if is_reduced else torch.float32},
            "computed in": [torch.bfloat16] * 3,
            "output": {torch.float32},
            "masters": {torch.float32},
            "gradients": {torch.float32},
        }, name


def norms_in_bf16(options):
    """Norms of three equal steps, before the second of which a forward pass is dropped."""
    config = config_here(strategy="fsdp", mixed_precision="bf16", **options)
    norms = []
    with start_session(config) as session:
        model, featuriser = prepared(session, config, dtype=torch.float32)
        for dropped in (False, True, False):
            parts = [parts_of(featuriser, session.rank, number) for number in range(2)]
            if dropped:
                model(parts[0])
                parameters.forget_forward(model)
            for number in range(2):
                parameters.set_fsdp_reduction(model, number == 1)
                (share_of_loss(model(parts[number])) * session.world_size).backward()
            norms.append(float(parameters.global_grad_norm(model)))
            model.zero_grad(set_to_none=True)
    return norms


def test_a_forward_without_backward_costs_no_gradient():
    grad_op = {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    cases = {"fsdp2": {}, "fsdp1": {"fsdp_version": 1}, "grad op": grad_op}
    results = on_two_ranks(norms_in_bf16, cases)
    whole = whole_step(config_here(), 2, dtype=torch.float32)
    for name in cases:
        for norms in result_of(results, name):
            assert norms == [norms[0]] * 3
            assert norms[0] == pytest.approx(whole.norm, rel=0.02)


# ---- weights that one process reads ----------------------------------------------------------------------------------


def prepared_weights():
    config = config_here(strategy="fsdp")
    with start_session(config) as session:
        built, _ = build(config, dtype=torch.float32, meta=session.builds_empty)
        num_meta = sum(parameter.is_meta for parameter in built.parameters())
        model = session.prepare(built, built.description.layer_classes)
        return session.builds_empty, num_meta, parameters.full_state_dict(model)


@pytest.mark.promise("D09")
def test_only_rank_0_reads_weights_and_all_have_them_afterwards():
    results = run_ranks(prepared_weights, 2)
    whole, _ = build(config_here(), dtype=torch.float32)
    num_parameters = len(list(whole.parameters()))
    read_by = [(is_empty, num_meta) for is_empty, num_meta, _ in results]
    assert read_by == [(False, 0), (True, num_parameters)]
    torch.testing.assert_close(results[0][2], whole.state_dict(), rtol=0, atol=0)
