"""Dtypes that FSDP takes, what is converted and what is said; the parameter summary; LoRA, bf16, weights read once."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.harness import STRATEGIES, result_of, run_cases, run_ranks
from tests.parallel.steps import (
    build,
    config_of,
    listen,
    parts_of,
    sharded_step,
    share_of_loss,
    whole_step,
)
from tests.tiny import shared, tiny_bert
from vembed.parallel import parameters
from vembed.parallel.session import start_session
from vembed.parallel.sharding import layer_units


@pytest.fixture
def lines():
    return listen()


def mixed():
    """A frozen bfloat16 base under float32 adapters and a bfloat16 head that is trained."""
    base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
    return nn.ModuleDict(
        {
            "base": base,
            "adapter": nn.Linear(4, 2),
            "head": nn.Linear(2, 2).to(torch.bfloat16),
        }
    )


@pytest.mark.promise("D36")
def test_uniform_dtype_is_said_in_the_documents_words(lines):
    assert (
        parameters.unify_model_dtype_for_fsdp(nn.Linear(2, 2).to(torch.bfloat16)) == 0
    )
    assert lines == ["FSDP dtype check: all parameters already in torch.bfloat16"]


@pytest.mark.promise("D29")
def test_masters_are_never_downcast_and_frozen_weights_stay_small(lines):
    model = mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert parameters.unify_model_dtype_for_fsdp(model) == 2
    assert lines == [
        "FSDP dtype check: converted 2 parameters (6 values) from torch.bfloat16 to torch.float32",
        "FSDP dtype check: trainable parameters in torch.float32, frozen ones in torch.bfloat16",
    ]
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        "base.weight": torch.bfloat16,
        "base.bias": torch.bfloat16,
        "adapter.weight": torch.float32,
        "adapter.bias": torch.float32,
        "head.weight": torch.float32,
        "head.bias": torch.float32,
    }
    assert all(
        torch.equal(value.to(before[name].dtype), before[name])
        for name, value in model.state_dict().items()
    )


@pytest.mark.promise("D29")
def test_fsdp1_needs_one_dtype_for_all(lines):
    model = mixed()
    assert parameters.unify_model_dtype_for_fsdp(model, fsdp_version=1) == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (
        lines[0]
        == "FSDP dtype check: converted 4 parameters (26 values) from torch.bfloat16 to torch.float32"
    )


def test_both_16_bit_dtypes_meet_in_float32():
    model = nn.ModuleList(
        [nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2).to(torch.float16)]
    )
    assert parameters.unify_model_dtype_for_fsdp(model) == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


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
    adapted = get_peft_model(model.backbone.to(torch.bfloat16), adapters)
    for parameter in adapted.parameters():
        parameter.data = (
            parameter.data.float() if parameter.requires_grad else parameter.data
        )
    model.backbone = adapted


def lora_step(folder, version):
    config = config_of(
        folder, strategy="fsdp", fsdp_version=version, gradient_checkpointing=False
    )
    return sharded_step(config, dtype=torch.float32, edit=add_lora)


@cache
def lora_on_ranks():
    """Both versions of FSDP in one start of the ranks."""
    folder = str(shared(tiny_bert, layers=3))
    return run_cases(
        lora_step,
        2,
        {str(version): (folder, version) for version in (1, 2)},
        process_group=False,
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.promise("D23", "D29", "D37")
def test_lora_trains_adapters_alone_over_a_frozen_base(version):
    folder = str(shared(tiny_bert, layers=3))
    first, second = result_of(lora_on_ranks(), str(version))
    whole = whole_step(
        config_of(folder, gradient_checkpointing=False),
        2,
        dtype=torch.float32,
        edit=add_lora,
    )
    frozen = "torch.bfloat16" if version == 2 else "torch.float32"
    assert set(first.facts["dtypes"]) == {("torch.float32", True), (frozen, False)}
    assert (
        first.summary["trainable"]
        == whole.summary["trainable"]
        < first.summary["total"]
        == whole.summary["total"]
    )
    assert f"  Trainable: {whole.summary['trainable']:,d} (0.00B)" in first.lines
    assert first.facts["with_gradient"] and all(
        "lora_" in name for name in first.facts["with_gradient"]
    )
    assert first.norm == pytest.approx(
        whole.norm, rel=0.02
    )  # the base computes in bfloat16 under FSDP2
    assert first.norm == second.norm
    for name, value in whole.weights.items():
        if "lora_" not in name:
            assert torch.equal(first.weights[name].to(value.dtype), value), name


# ---- precision -------------------------------------------------------------------------------------------------------


def seen_in_bf16(folder, options):
    recorded = {"hooks": 0, "reduced_in": set()}
    # In torch's namespace, where FSDP finds it.
    name = (
        "reduce_scatter_single"
        if "reduce_scatter_single" in vars(dist)
        else "reduce_scatter_tensor"
    )
    original = getattr(dist, name)

    def reduce_scatter(*args, **more):
        recorded["reduced_in"].update(
            str(tensor.dtype)
            for tensor in (*args, *more.values())
            if isinstance(tensor, Tensor)
        )
        return original(*args, **more)

    setattr(dist, name, reduce_scatter)
    with start_session(
        config_of(folder, strategy="fsdp", gradient_checkpointing=False, **options)
    ) as session:
        model, featuriser = build(
            session.placement.run.config, dtype=torch.float32, meta=session.builds_empty
        )
        layers = model.description.layer_classes
        model = session.prepare(model, layers)

        def note(module, args, output):
            recorded["hooks"] += 1
            recorded["computed_in"] = str(
                (output if isinstance(output, Tensor) else output[0]).dtype
            )

        for layer in [
            module
            for module in model.modules()
            if type(module).__name__.removeprefix("FSDP") in layers
        ]:
            layer.register_forward_hook(note)
        (output,) = model(parts_of(featuriser, session.rank, 0))
        output.sum().backward()
        recorded["output"] = str(output.dtype)
        recorded["masters"] = sorted(
            {str(value.dtype) for value in parameters.full_state_dict(model).values()}
        )
        recorded["gradients"] = sorted(
            {
                str(parameter.grad.dtype)
                for parameter in model.parameters()
                if parameter.grad is not None
            }
        )
    setattr(dist, name, original)
    return recorded


IN_BF16 = [
    ({"fsdp_version": 1, "mixed_precision": "bf16"}, "torch.float32"),
    ({"mixed_precision": "bf16"}, "torch.float32"),
    (
        {"mixed_precision": "bf16", "fsdp_reduce_dtype": "bfloat16"},
        "torch.bfloat16",
    ),
]


@cache
def bf16_on_ranks():
    """All options in one start of the ranks."""
    folder = str(shared(tiny_bert, layers=3))
    return run_cases(
        seen_in_bf16,
        2,
        {str(options): (folder, options) for options, _ in IN_BF16},
        process_group=False,
    )


@pytest.mark.parametrize(("options", "reduced_in"), IN_BF16, ids=str)
@pytest.mark.promise("B13", "C23", "D15", "E13", "E17")
def test_bf16_computes_in_bf16_and_keeps_float32_masters(options, reduced_in):
    recorded, _ = result_of(bf16_on_ranks(), str(options))
    assert recorded == {
        "hooks": 3,
        "reduced_in": {reduced_in},
        "computed_in": "torch.bfloat16",
        "output": "torch.float32",
        "masters": ["torch.float32"],
        "gradients": ["torch.float32"],
    }


def norms_in_bf16(folder, options):
    config = config_of(
        folder,
        strategy="fsdp",
        mixed_precision="bf16",
        gradient_checkpointing=False,
        **options,
    )
    norms = []
    with start_session(config) as session:
        model, featuriser = build(
            config, dtype=torch.float32, meta=session.builds_empty
        )
        model = session.prepare(model, model.description.layer_classes)
        for dropped in (False, True, False):
            parts = [parts_of(featuriser, session.rank, number) for number in range(2)]
            if dropped:
                model(parts[0])
                parameters.forget_forward(model)
            for number in range(2):
                parameters.set_gradient_sync(model, number == 1)
                (share_of_loss(model(parts[number])) * session.world_size).backward()
            norms.append(float(parameters.global_grad_norm(model)))
            model.zero_grad(set_to_none=True)
    return norms


FORGETTING = [
    {},
    {"fsdp_version": 1},
    {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
]


@cache
def norms_on_ranks():
    """All options in one start of the ranks."""
    folder = str(shared(tiny_bert, layers=3))
    return run_cases(
        norms_in_bf16,
        2,
        {str(options): (folder, options) for options in FORGETTING},
        process_group=False,
    )


@pytest.mark.parametrize("options", FORGETTING)
def test_a_forward_without_backward_costs_no_gradient(options):
    folder = str(shared(tiny_bert, layers=3))
    whole = whole_step(
        config_of(folder, gradient_checkpointing=False), 2, dtype=torch.float32
    )
    for norms in result_of(norms_on_ranks(), str(options)):
        assert norms == [norms[0]] * 3
        assert norms[0] == pytest.approx(whole.norm, rel=0.02)


# ---- weights that one process reads ----------------------------------------------------------------------------------


def prepared_weights(folder):
    config = config_of(folder, strategy="fsdp")
    with start_session(config) as session:
        model, _ = build(config, dtype=torch.float32, meta=session.builds_empty)
        real = sum(
            parameter.numel()
            for parameter in model.parameters()
            if not parameter.is_meta
        )
        total = sum(parameter.numel() for parameter in model.parameters())
        model = session.prepare(model, model.description.layer_classes)
        return real, total, parameters.full_state_dict(model), session.builds_empty


@pytest.mark.promise("D09")
def test_only_rank_0_reads_weights_and_all_have_them_afterwards():
    folder = str(shared(tiny_bert, layers=3))
    results = run_ranks(prepared_weights, 3, folder, process_group=False)
    assert [real for real, *_ in results] == [results[0][1], 0, 0]
    assert [empty for *_, empty in results] == [False, True, True]
    whole, _ = build(config_of(folder), dtype=torch.float32)
    state = results[0][2]
    assert set(state) == set(whole.state_dict())
    assert all(
        torch.equal(state[name], value) for name, value in whole.state_dict().items()
    )


# ---- editing weights -------------------------------------------------------------------------------------------------


def project_out(weight):
    """W - lambda v v^T W."""
    direction = torch.nn.functional.normalize(
        torch.arange(1.0, weight.shape[0] + 1), dim=0
    ).to(weight)
    return weight - 0.7 * torch.outer(direction, direction @ weight)


def edited(folder, options, name):
    config = config_of(folder, **options)
    with start_session(config) as session:
        built, featuriser = build(
            config, dtype=torch.float64, meta=session.builds_empty
        )
        model = session.prepare(built, built.description.layer_classes)
        parameters.edit_weights(model, {name: project_out})
        with pytest.raises(KeyError, match="no parameter 'nowhere'"):
            parameters.edit_weights(model, {"nowhere": project_out})
        with torch.no_grad():
            return parameters.full_state_dict(model), model(parts_of(featuriser, 0, 0))[
                0
            ]


EDITED = "backbone.encoder.layer.1.output.dense.weight"


@cache
def edited_on_ranks():
    """Every strategy in one start of the ranks."""
    folder = str(shared(tiny_bert, layers=3))
    cases = {name: (folder, options, EDITED) for name, options in STRATEGIES.items()}
    return run_cases(edited, 2, cases, process_group=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.promise("B18")
def test_weights_can_be_edited_on_shards(strategy):
    folder = str(shared(tiny_bert, layers=3))
    whole, featuriser = build(config_of(folder), dtype=torch.float64)
    whole.get_parameter(EDITED).data = project_out(whole.get_parameter(EDITED).data)
    expected = whole(parts_of(featuriser, 0, 0))[0]
    results = result_of(edited_on_ranks(), strategy)
    for _, output in results:
        torch.testing.assert_close(output, expected.detach())
    state = results[0][0]
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value)
    assert len(layer_units(whole, whole.description.layer_classes)) == 3
