"""`vembed doctor --model-class`: the rules that a module of the user's must keep, and a sentence for each it breaks."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vembed.errors import UserError
from vembed.models.custom.modeling import (
    PACKED,
    UserModel,
    UserModelConfig,
    accepted_inputs,
    load_weights,
)
from vembed.models.custom.own_code import find_class, settings_of
from vembed.models.embedding_model import Inputs, sums_and_counts
from vembed.models.families.backbones import layers_of

TOLERANCE = 1e-5


def check_model(
    named: str, arguments: Mapping[str, Any] | None
) -> Iterator[tuple[str, str | None]]:
    """Yield each rule, and the sentence that says how the class breaks it; None where it keeps it."""
    trial = ClassTrial(named, arguments or {})
    yield "its forward takes texts or images and gives hidden states or vectors", None
    rules = {
        "in training it gives the same result under the same seed": trial.replays,
        "padding does not change the result": trial.padding,
        "texts in one row, without padding, give the same result": trial.packed,
        "the gradient reaches every parameter": trial.gradients,
        "its own losses add up over micro-batches": trial.losses,
        "saved and loaded it gives the same result": trial.loads,
    }
    for rule, check in rules.items():
        if check != trial.packed or trial.packs:
            yield rule, check()
    layers = sorted({type(layer).__name__ for layer in layers_of(trial.model)})
    names = ", ".join(layers) or "none found, so it is one unit"
    yield f"layers for FSDP units and recomputation: {names}", None


class ClassTrial:
    """A module of the class on the CPU, and small inputs for it."""

    def __init__(self, named: str, arguments: Mapping[str, Any]) -> None:
        code = find_class(named)
        self.name = code.__name__
        values = dict(settings_of(code, arguments))
        for key in ("model_type", "auto_map"):
            values.pop(key, None)
        self.config = UserModelConfig(**values)
        self.kind = UserModel.of(code)
        self.model = self._build(0)
        accepted = accepted_inputs(code)
        names = {"text": "input_ids", "image": "pixel_values"}
        self.kinds = [kind for kind, name in names.items() if name in accepted]
        self.packs = PACKED in accepted and "text" in self.kinds
        self.num_ids = 100
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                self.num_ids = min(self.num_ids, module.num_embeddings)

    # ---- rules -------------------------------------------------------------------------------------------------

    def replays(self) -> str | None:
        """Run twice in training mode under one seed, as Gradient Cache does."""
        for inputs in self._all_inputs(3, 7):
            first = self._states(inputs, 5)
            if not torch.equal(first, self._states(inputs, 5)):
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
        difference = self._states(alone)[0] - self._states(padded)[0, :4]
        error = float(difference.abs().max())
        if error <= TOLERANCE:
            return None
        return (
            f"padding changes the result of {self.name} (by {error:.2g}): mask what it adds up or attends to by "
            "attention_mask, and count positions from the first token"
        )

    def packed(self) -> str | None:
        """Compare texts of three lengths in one row with each of them alone."""
        texts = [self._inputs("text", 1, length) for length in (4, 7, 5)]
        row = {}
        for name in texts[0]:
            row[name] = torch.cat([text[name] for text in texts], dim=1)
        row[PACKED] = torch.tensor([0, 4, 11, 16], dtype=torch.int32)
        expected = torch.cat([self._states(text) for text in texts], dim=1)
        states = self._run(self.model, row).last_hidden_state
        if states is None or states.shape != expected.shape:
            shape = None if states is None else list(states.shape)
            return (
                f"{self.name} takes {PACKED} and gives {shape} for three texts of 16 tokens in one row: return "
                f"{list(expected.shape)}, or one vector for each text"
            )
        error = float((states - expected).abs().max())
        if error <= TOLERANCE:
            return None
        return (
            f"{self.name} takes {PACKED}, and texts in one row change each other (by {error:.2g}): let each text see only "
            f"the tokens between two of these positions, or leave {PACKED} out of the forward"
        )

    def gradients(self) -> str | None:
        """Backpropagate from everything that the module gives."""
        self.model.zero_grad(set_to_none=True)
        for inputs in self._all_inputs(3, 7):
            output = self._run(self.model, inputs, seed=1, with_graph=True)
            states = output.last_hidden_state
            draw = torch.Generator().manual_seed(0)
            total = (states * torch.randn(states.shape, generator=draw)).sum()
            for values in self._losses(output, 3).values():
                total = total + values[0].sum()
            total.backward()
        names = []
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                names.append(name.removeprefix("own."))
        if not names:
            return None
        return f"no gradient reaches {', '.join(names)} of {self.name}: use them in the forward, or leave them out"

    def losses(self) -> str | None:
        """Compare sums and counts of a batch with those of its inputs one by one."""
        for inputs in self._all_inputs(3, 6):
            first = self._states(inputs, seed=1)
            if not torch.equal(first, self._states(inputs, seed=2)):
                continue  # with dropout, or another draw, the parts differ from the whole
            whole = self._losses(self._run(self.model, inputs, seed=1), 3)
            sums = dict.fromkeys(whole, torch.zeros(()))
            for row in range(3):
                part = {name: values[[row]] for name, values in inputs.items()}
                losses = self._losses(self._run(self.model, part, seed=1), 1)
                for name in whole:
                    sums[name] = sums[name] + losses[name].reshape(2, -1).sum(dim=1)
            for name, values in whole.items():
                expected = values.reshape(2, -1).sum(dim=1)
                if not torch.allclose(expected, sums[name], rtol=1e-4, atol=1e-5):
                    return (
                        f"the loss {name} of {self.name} is no sum over its inputs, so it depends on the micro-batches: "
                        "return (sums, counts), the numbers before their division"
                    )
        return None

    def loads(self) -> str | None:
        """Save, load into a module with other weights, and compare."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            other = self._build(1)
            info = load_weights(other, Path(folder))
        for name in (*info["missing_keys"], *info["unexpected_keys"]):
            return f"{self.name} does not load what it saves: {name.removeprefix('own.')} differs"
        for inputs in self._all_inputs(2, 5):
            loaded = self._run(other, inputs).last_hidden_state
            if not torch.equal(self._states(inputs), loaded):
                return (
                    f"{self.name} gives something else after saving and loading: a random tensor is neither a "
                    "parameter nor a persistent buffer"
                )
        return None

    # ---- parts -------------------------------------------------------------------------------------------------

    def _build(self, seed: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.kind(self.config).eval()

    def _all_inputs(self, count: int, length: int) -> list[Inputs]:
        """Return inputs of each kind that the module takes."""
        return [self._inputs(kind, count, length) for kind in self.kinds]

    def _inputs(
        self,
        kind: str,
        count: int,
        length: int,
    ) -> Inputs:
        draw = torch.Generator().manual_seed(count * 100 + length)
        if kind == "text":
            ids = torch.randint(1, self.num_ids, (count, length), generator=draw)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        side = vars(self.model.own).get("image_size")
        side = side if isinstance(side, int) else 32
        return {"pixel_values": torch.rand(count, 3, side, side, generator=draw)}

    def _states(self, inputs: Inputs, seed: int | None = None) -> Tensor:
        states: Tensor = self._run(self.model, inputs, seed).last_hidden_state
        return states

    def _run(
        self,
        model: Any,
        inputs: Inputs,
        seed: int | None = None,
        *,
        with_graph: bool = False,
    ) -> Any:
        """Run in evaluation mode, or, with a seed, in training mode."""
        model.train(seed is not None)
        # Without a seed the generator runs on, so that a draw in evaluation mode shows.
        with (
            torch.set_grad_enabled(with_graph),
            torch.random.fork_rng(devices=[], enabled=seed is not None),
        ):
            if seed is not None:
                torch.manual_seed(seed)
            output = model(**inputs)
        model.eval()
        return output

    def _losses(self, output: Any, count: int) -> dict[str, Tensor]:
        try:
            return sums_and_counts(output.auxiliary or {}, count)
        except TypeError as error:
            raise UserError(f"model_class: {self.name}: {error}") from error
