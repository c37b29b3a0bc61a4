"""`vembed doctor --model-class`: the rules that a module of the user's must keep, and a sentence for each it breaks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.models.custom.classes import OwnCode, find_class
from vembed.models.custom.folder import settings_of
from vembed.models.custom.modeling import (
    PACKED,
    OwnConfig,
    OwnModel,
    OwnOutput,
    accepted_inputs,
    load_weights,
)
from vembed.models.families.backbones import layers_of
from vembed.models.modalities import sums_and_counts

TOLERANCE = 1e-5
MAX_NAMED = 3
Inputs = dict[str, Tensor]


def check_model(
    named: str, arguments: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield each rule, and the sentence that says how the class breaks it; None where it keeps it."""
    code = find_class(named)
    trial = ClassTrial(code, arguments or {})
    yield "its forward takes texts or images and gives hidden states or vectors", None
    rules: list[tuple[str, Callable[[], str | None]]] = [
        (
            "the size of what it gives does not depend on the number of inputs and tokens",
            trial.shapes,
        ),
        ("in evaluation it gives the same result twice", trial.same_twice),
        ("in training it gives the same result under the same seed", trial.replays),
        ("padding does not change the result", trial.padding),
        *(
            [("texts in one row, without padding, give the same result", trial.packed)]
            if trial.packs
            else []
        ),
        ("the gradient reaches every parameter", trial.gradients),
        ("its own losses add up over micro-batches", trial.losses),
        (
            "it can be built without values, for processes that receive their weights",
            trial.builds_empty,
        ),
        ("saved and loaded it gives the same result", trial.loads),
    ]
    for rule, check in rules:
        yield rule, check()
    layers = sorted({type(layer).__name__ for layer in layers_of(trial.model)})
    yield (
        f"layers for FSDP units and recomputation: {', '.join(layers) or 'none found, so it is one unit'}",
        None,
    )


class ClassTrial:
    """A module of the class on the CPU, and small inputs for it."""

    def __init__(self, code: OwnCode, arguments: Mapping[str, Any]) -> None:
        self.code = code
        self.name = code.name
        values = settings_of(code, arguments)
        self.config = OwnConfig(
            **{
                name: value
                for name, value in values.items()
                if name not in ("model_type", "auto_map")
            }
        )
        self.kind = OwnModel.of(code.value)
        self.model = self._built(0)
        accepted = accepted_inputs(code.value)
        self.kinds = [
            kind
            for kind, name in (("text", "input_ids"), ("image", "pixel_values"))
            if name in accepted
        ]
        self.packs = PACKED in accepted and "text" in self.kinds
        tables = [
            module.num_embeddings
            for module in self.model.modules()
            if isinstance(module, nn.Embedding)
        ]
        self.num_ids = min(max(tables, default=100), 100)

    # ---- rules -------------------------------------------------------------------------------------------------

    def shapes(self) -> str | None:
        """Try other numbers of inputs and of tokens."""
        for kind, (count, length) in itertools.product(self.kinds, ((1, 4), (3, 7))):
            hidden = self._run(self.model, self._inputs(kind, count, length))
            assert hidden.last_hidden_state is not None
            output = tuple(hidden.last_hidden_state.shape)
            expected = (count, length, self.config.hidden_size)
            if kind == "text" and output != expected:
                return (
                    f"{self.name} gives {list(output)} for {count} texts of {length} tokens, and must give "
                    f"{list(expected)} (or one vector for each)"
                )
            if output[0] != count or output[-1] != self.config.hidden_size:
                size = self.config.hidden_size
                return f"{self.name} gives {list(output)} for {count} {kind}s, not {size} numbers for each"
        return None

    def same_twice(self) -> str | None:
        """Run twice in evaluation mode, without setting a seed."""
        for inputs in self._every(3, 7):
            if (
                self._distance(
                    self._run(self.model, inputs), self._run(self.model, inputs)
                )
                > 0
            ):
                return f"{self.name} draws at random in evaluation mode too: let it do so only while self.training is true"
        return None

    def replays(self) -> str | None:
        """Run twice in training mode under one seed, as Gradient Cache does."""
        for inputs in self._every(3, 7):
            first, second = (self._run(self.model, inputs, seed=5) for _ in range(2))
            if self._distance(first, second) > 0:
                return (
                    f"{self.name} draws from a hidden generator or changes its own state: under the same seed its "
                    "second forward pass differs, and Gradient Cache runs it twice; draw with torch's default generator"
                )
        return None

    def padding(self) -> str | None:
        """Compare a text alone with the same text beside a longer one."""
        if "text" not in self.kinds:
            return None
        alone = self._inputs("text", 1, 4)
        padded = self._inputs("text", 2, 9)
        padded["input_ids"][0, :4] = alone["input_ids"][0]
        padded["attention_mask"][0, 4:] = 0
        # Token 0, not a padding token: a model that masks must not care which it is.
        padded["input_ids"][0, 4:] = 0
        expected = self._run(self.model, alone)
        output = self._run(self.model, padded)
        assert (
            expected.last_hidden_state is not None
            and output.last_hidden_state is not None
        )
        error = float(
            (expected.last_hidden_state[0] - output.last_hidden_state[0, :4])
            .abs()
            .max()
        )
        if not error <= TOLERANCE:
            return (
                f"padding changes the result of {self.name} (by {error:.2g}): mask what it adds up or attends to by "
                "attention_mask, and count positions from the first token"
            )
        return None

    def packed(self) -> str | None:
        """Compare texts of three lengths in one row with each of them alone."""
        texts = [self._inputs("text", 1, length) for length in (4, 7, 5)]
        row = {
            name: torch.cat([parameter[name] for parameter in texts], dim=1)
            for name in texts[0]
        }
        starts = torch.tensor([0, 4, 11, 16], dtype=torch.int32)
        output = self._run(self.model, {**row, PACKED: starts}).last_hidden_state
        expected = torch.cat(
            [_states(self._run(self.model, text)) for text in texts], dim=1
        )
        if output is None or output.shape != expected.shape:
            return (
                f"{self.name} takes {PACKED} and gives {None if output is None else list(output.shape)} for three texts "
                f"of 16 tokens in one row: return {list(expected.shape)}, or one vector for each text"
            )
        error = float((output - expected).abs().max())
        if not error <= TOLERANCE:
            return (
                f"{self.name} takes {PACKED}, and texts in one row change each other (by {error:.2g}): let each text "
                f"see only the tokens between two of these positions, or leave {PACKED} out of the forward"
            )
        return None

    def gradients(self) -> str | None:
        """Backpropagate from everything that the module gives."""
        self.model.zero_grad(set_to_none=True)
        for inputs in self._every(3, 7):
            output = self._run(self.model, inputs, seed=1, with_graph=True)
            states = _states(output)
            total = (
                states
                * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
            ).sum()
            for values in self._losses(output, 3).values():
                total = total + values[0].sum()
            torch.autograd.backward(total)
        without = [
            name.removeprefix("own.")
            for name, parameter in self.model.named_parameters()
            if parameter.grad is None
        ]
        if without:
            more = (
                f" and {len(without) - MAX_NAMED} more"
                if len(without) > MAX_NAMED
                else ""
            )
            return (
                f"no gradient reaches {', '.join(without[:MAX_NAMED])}{more} of {self.name}: the forward does not use "
                "them; use them, or leave them out"
            )
        return None

    def losses(self) -> str | None:
        """Compare sums and counts of a batch with those of its inputs one by one."""
        return next(
            (
                output
                for inputs in self._every(3, 6)
                if (output := self._added(inputs)) is not None
            ),
            None,
        )

    def _added(self, inputs: Inputs) -> str | None:
        if (
            self._distance(
                *(self._run(self.model, inputs, seed=seed) for seed in (1, 2))
            )
            > 0
        ):
            return (
                None  # with dropout, or another draw, the parts differ from the whole
            )
        whole = self._losses(self._run(self.model, inputs, seed=1), 3)
        parts = [
            self._losses(
                self._run(
                    self.model,
                    {name: input_[[row]] for name, input_ in inputs.items()},
                    seed=1,
                ),
                1,
            )
            for row in range(3)
        ]
        for name, values in whole.items():
            added = torch.stack([part[name].sum(dim=1) for part in parts]).sum(dim=0)
            if not torch.allclose(values.sum(dim=1), added, rtol=1e-4, atol=1e-5):
                return (
                    f"the loss {name} of {self.name} is no sum over its inputs, so it depends on the micro-batches: "
                    "return (sums, counts), the numbers before their division"
                )
        return None

    def builds_empty(self) -> str | None:
        """Build with empty parameters and full buffers."""
        try:
            # As ranks above 0 build a model under FSDP: parameters on the meta device, buffers with values.
            with init_empty_weights(include_buffers=False):
                model = self.kind(self.config)
        except (RuntimeError, NotImplementedError) as error:
            return f"the constructor of {self.name} reads values of its parameters ({_first_line(error)}); only set them"
        real = [
            name
            for name, parameter in model.named_parameters()
            if parameter.device.type != "meta"
        ]
        return (
            f"{real[0]} of {self.name} is made outside of register_parameter"
            if real
            else None
        )

    def loads(self) -> str | None:
        """Save, load into a module with other weights, and compare."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            other = self._built(1)
            info = load_weights(other, Path(folder))
        if info["missing_keys"] or info["unexpected_keys"]:
            names = [*info["missing_keys"], *info["unexpected_keys"]]
            return f"{self.name} does not load what it saves: {names[0].removeprefix('own.')} differs"
        for inputs in self._every(2, 5):
            if (
                self._distance(self._run(self.model, inputs), self._run(other, inputs))
                > 0
            ):
                return (
                    f"{self.name} gives something else after saving and loading: a random tensor is neither a "
                    "parameter nor a persistent buffer"
                )
        return None

    # ---- parts -------------------------------------------------------------------------------------------------

    def _built(self, seed: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.kind(self.config).eval()

    def _every(self, count: int, length: int) -> list[Inputs]:
        """Return inputs of each kind that the module takes."""
        return [self._inputs(kind, count, length) for kind in self.kinds]

    def _inputs(self, kind: str, count: int, length: int) -> Inputs:
        draw = torch.Generator().manual_seed(count * 100 + length)
        if kind == "text":
            ids = torch.randint(1, self.num_ids, (count, length), generator=draw)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        side = vars(self.model.own).get("image_size")
        side = side if isinstance(side, int) else 32
        return {"pixel_values": torch.rand(count, 3, side, side, generator=draw)}

    def _run(
        self,
        model: Any,
        inputs: Inputs,
        *,
        seed: int | None = None,
        with_graph: bool = False,
    ) -> OwnOutput:
        """Run in evaluation mode, or, with a seed, in training mode."""
        model.train(seed is not None)
        # Without a seed the generator runs on, so that a draw in evaluation mode shows.
        with (
            torch.set_grad_enabled(with_graph),
            torch.random.fork_rng(devices=[], enabled=seed is not None),
        ):
            if seed is not None:
                torch.manual_seed(seed)
            output: OwnOutput = model(**inputs)
        model.eval()
        return output

    def _losses(self, output: OwnOutput, count: int) -> dict[str, Tensor]:
        try:
            return sums_and_counts(output.auxiliary or {}, count)
        except TypeError as error:
            raise UserError(f"model_class: {self.name}: {error}") from error

    def _distance(self, first: OwnOutput, other: OwnOutput) -> float:
        return float((_states(first) - _states(other)).abs().max())


def _states(output: OwnOutput) -> Tensor:
    assert output.last_hidden_state is not None
    return output.last_hidden_state


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
