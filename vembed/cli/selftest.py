"""Self-test of `vembed doctor`, run by each process: a small model through every part of a sharded run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from vembed.cli.support import is_first_rank, print_lines
from vembed.models.embedding_model import EmbeddingModel, Inputs
from vembed.models.families.description import ModelDescription
from vembed.parallel import collectives, devices, parameters
from vembed.parallel.environment import read_rank_info
from vembed.parallel.session import Session, start_command_session

TIMEOUT_MINUTES = 0.5
TOLERANCE = 1e-4
LAYER = "LlamaDecoderLayer"
HIDDEN_SIZE = 64
EDITED = "backbone.layers.0.mlp.down_proj.weight"


def main() -> int:
    """Run all checks. Rank 0 prints one line each; any rank prints its failures."""
    with check("start"):
        session = start_command_session(
            strategy="fsdp", timeout_minutes=TIMEOUT_MINUTES
        )
        total = collectives.sum_ints([1])[0]
        device = session.device.type
        line = f"* Started with {total} process, so nothing is sharded ({device})"
        if session.strategy == "fsdp":
            backend = torch.distributed.get_backend()
            line = f"* FSDP initialized with {total} processes ({backend}, {device})"
        expected = read_rank_info().world_size
        if total != expected:
            raise RuntimeError(f"{total} processes answered instead of {expected}")
        _say(f"{line}: pass")
    with session:
        _run(session)
    return 0


def _run(session: Session) -> None:
    rank = session.rank
    world_size = session.world_size
    inputs = _inputs(rank, session.device)
    _say("Loading model with FSDP...")
    with check("shard"):
        whole = small_model().to(session.device)
        model = session.prepare(small_model(), (LAYER,))
        num_bytes = parameters.local_bytes(model)
        share = num_bytes / parameters.local_bytes(whole)
        # A tenth more: shards are padded to equal sizes.
        if share > 1.1 / world_size:
            raise RuntimeError(
                f"this process holds {share:.0%} of the model, which should be 1/{world_size}"
            )
        _say(
            f"* Model loaded successfully with FSDP ({share:.0%} of it on each process): pass"
        )
    _say("Testing basic operations...")
    with check("forward", "embeddings equal those of the whole model"):
        output = model(inputs)[0]
        _compare(output.detach(), whole(inputs)[0].detach(), "embeddings")
    with check("backward"):
        # Times world_size: FSDP and GradientSync average over ranks, and the whole model sums over all inputs.
        (output.square().sum() * world_size).backward()
        if session.strategy != "fsdp":
            collectives.GradientSync(model.parameters()).finish()
        for other in range(world_size):
            (output_of_whole,) = whole(_inputs(other, session.device))
            output_of_whole.square().sum().backward()
        ours = parameters.global_grad_norm(model)
        theirs = parameters.global_grad_norm(whole)
        _compare(ours, theirs, "gradient norms")
        _say(
            f"* backward: gradient norm {float(ours):.4f} equals that of one process on all inputs: pass"
        )
    with check("gather", "the full weights equal those of one process"):
        state = parameters.full_state_dict(model)
        if rank == 0:
            for name, value in whole.state_dict().items():
                _compare(state[name], value.cpu(), name)
    with check("weight edit", "W - v v^T W on shards equals it on the whole weight"):
        parameters.edit_weights(model, {EDITED: _project_out})
        edited = parameters.full_state_dict(model)
        if rank == 0:
            _compare(edited[EDITED], _project_out(state[EDITED]), EDITED)
        collectives.barrier()
    _say("Testing FSDP-aware memory management...")
    with check("memory", "measured on every process, caches emptied together"):
        devices.fsdp_empty_cache()
        devices.fsdp_print_memory_usage()


def small_model() -> EmbeddingModel:
    """Return the tiny Llama as an embedder, identical on every process."""
    description = ModelDescription(
        family="text_decoder",
        source="",
        embedding_dim=HIDDEN_SIZE,
        hidden_dim=HIDDEN_SIZE,
        pooling="mean",
        modalities=("text",),
        layer_classes=(LAYER,),
        max_length=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = LlamaModel(
            LlamaConfig(
                vocab_size=512,
                hidden_size=HIDDEN_SIZE,
                intermediate_size=2 * HIDDEN_SIZE,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )
    return EmbeddingModel(description, backbone)


@contextmanager
def check(name: str, passed: str = "") -> Iterator[None]:
    """Print a failure on the rank where it happens, which then exits; otherwise what has passed, where it is known
    before."""
    try:
        yield
        if passed:
            _say(f"* {name}: {passed}: pass")
    except Exception as error:
        rank = read_rank_info().rank
        print_lines(f"* {name}: FAIL on rank {rank}: {type(error).__name__}: {error}")
        raise SystemExit(1) from error


def _inputs(rank: int, device: torch.device | str) -> list[tuple[str, Inputs]]:
    # [3, 5 + rank] token ids: ranks have texts of different lengths.
    length = 5 + rank
    ids = torch.arange(3 * length) * 37 % 512
    ids = ids.view(3, length).to(device)
    return [("text", {"input_ids": ids, "attention_mask": torch.ones_like(ids)})]


def _project_out(weight: Tensor) -> Tensor:
    direction = nn.functional.normalize(
        torch.arange(1.0, weight.shape[0] + 1), dim=0
    ).to(weight)
    return weight - torch.outer(direction, direction @ weight)


def _compare(ours: Tensor, theirs: Tensor, what: str) -> None:
    difference = float((ours - theirs).abs().max())
    # Written so that NaN fails.
    if not difference <= TOLERANCE * max(1.0, float(theirs.abs().max())):
        raise RuntimeError(
            f"{what} differ from those of one process by {difference:.3g}"
        )


def _say(line: str) -> None:
    if is_first_rank():
        print_lines(line)
