"""Heads: what stands behind the hidden states or the pooled vectors of a model.

Dense modules give the embedding, ScoreHead and AnswerHead the score of a reranker, and LanguageHead the language-model
loss of a published text model. The last three run the head's own code as Transformers has it: it stands in its class,
in which the base model is replaced by the hidden states of this forward.

A reranker is an embedding model of pairs whose embedding has one dimension, the score. Tower, pooling, adapters,
sharding and saving are those of embedding models.
"""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from vembed.errors import UserError
from vembed.files import check_weights
from vembed.models.families.backbones import StateDict, is_decoder_only, language_class
from vembed.models.families.description import ModelDescription
from vembed.models.families.model_files import (
    ANSWER_SETTINGS,
    LIBRARY_ERRORS,
    AnswerSettings,
    DenseSettings,
    error_sentence,
    read_settings,
    read_tensors,
)
from vembed.models.poolings.table import POOLINGS
from vembed.models.processors import load_tokenizer

log = logging.getLogger(__name__)

# ---- Dense modules -----------------------------------------------------------------------------------------------


IDENTITY = "torch.nn.modules.linear.Identity"


class Dense(nn.Module):
    """A linear layer and an activation, equivalent to the Dense module of Sentence Transformers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        activation: str = IDENTITY,
    ) -> None:
        """`activation`: dotted path of a class in torch.nn, as Sentence Transformers writes it. Raise TypeError for any
        other, and for a layer with sizes of its own."""
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation_path = activation
        kind = vars(nn).get(activation.rsplit(".", 1)[-1])
        if not activation.startswith("torch.nn") or not isinstance(kind, type):
            raise TypeError(f"{activation} is not a module of torch.nn")
        self.activation = kind()

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [n, in_features] to [n, out_features], in the dtype of the weights."""
        # Outside autocast: a Dense module is small, and its output is the embedding.
        with torch.autocast(vectors.device.type, enabled=False):
            linear = self.linear(vectors.to(self.linear.weight.dtype))
            activated: Tensor = self.activation(linear)
        return activated

    def settings(self) -> dict[str, Any]:
        """Return the module's config.json in the Sentence Transformers layout."""
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": self.activation_path,
        }


def load_dense(folder: Path) -> Dense:
    """Load a Dense module saved by Sentence Transformers."""
    settings: DenseSettings = read_settings(folder / "config.json", DenseSettings)
    check_weights(folder)
    try:
        dense = Dense(
            settings.in_features,
            settings.out_features,
            bias=settings.bias,
            activation=settings.activation_function or IDENTITY,
        )
        weights = load_file(folder / "model.safetensors")
        # The parameters are float32: a file in 16 bits is widened as it is copied.
        dense.load_state_dict(weights)
    except (TypeError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(
            f"the Dense module of {folder} cannot be loaded: {error_sentence(error)}"
        ) from error
    return dense


def principal_components(sample: Tensor, out_features: int) -> Tensor:
    """Return [out_features, dim], the principal components of the unit vectors of `sample` [n, dim], strongest first.

    Signs are fixed, so that all machines get the same result. If `sample` has fewer rows than components, the remaining
    ones are arbitrary orthogonal directions.
    """
    # float64: a covariance of float32 rounds away the weak directions.
    unit = functional.normalize(sample.double(), dim=1)
    centred = unit - unit.mean(dim=0)
    covariance = centred.T @ centred
    # eigh returns ascending eigenvalues with eigenvectors as columns: flip, then transpose to rows.
    eigenvectors = torch.linalg.eigh(covariance).eigenvectors
    directions: Tensor = eigenvectors.flip(1).T[:out_features]
    # An eigenvector has no sign. Its largest coordinate is made positive, so that runs agree.
    place = directions.abs().argmax(dim=1, keepdim=True)
    largest = directions.gather(1, place)
    return (directions * largest.sign()).to(sample.dtype)


# ---- heads that run in their class of Transformers ---------------------------------------------------------------


class GivenStates(nn.Module):
    """Stands in the place of the base model and gives the hidden states that it was handed."""

    states: Tensor | None = None

    def __init__(
        self,
        pooler: nn.Module | None,
        activation: nn.Module | None = None,
    ) -> None:
        """`pooler`: the base model's layer over the first token, which only classifiers use. `activation`: of ALBERT, whose
        pooler is a linear layer alone."""
        super().__init__()
        self.pooler = pooler
        self.activation = activation

    def forward(
        self, *_: Any, **__: Any
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return them."""
        pooled = None if self.pooler is None else self.pooler(self.states)
        if self.activation is not None:
            pooled = self.activation(pooled)[:, 0]
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.states, pooler_output=pooled
        )
        # Handed on by mixtures of experts and by vision-language models.
        output.router_logits = None
        output.rope_deltas = None
        return output


class WholeHead(nn.Module):
    """The layers of a whole model of Transformers behind its base model."""

    def __init__(
        self,
        whole: PreTrainedModel,
        description: ModelDescription,
        pooler: nn.Module | None = None,
    ) -> None:
        """`whole`: the model. Its base model is taken out of it."""
        super().__init__()
        self.base_name = str(whole.base_model_prefix)
        activation = None
        if pooler is not None:
            activation = getattr(whole.base_model, "pooler_activation", None)
        setattr(whole, self.base_name, GivenStates(pooler, activation))
        self.whole = whole
        stored = read_tensors(description.folder)
        names = [name for name, _ in whole.named_parameters()]
        self.is_new = any(name not in stored for name in names)
        """True: its weights are not those of files."""

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return what the head gives for hidden states [n, tokens, dim] and as many tokens."""
        stand_in: Any = getattr(self.whole, self.base_name)
        stand_in.states = states
        try:
            logits: Tensor = self.whole(input_ids=ids).logits
        finally:
            stand_in.states = None
        return logits


def choose_class_with_head(
    description: ModelDescription, config: PretrainedConfig
) -> type[PreTrainedModel]:
    """Return the class of the model with its head: a classifier, where one label gives the score of a reranker, otherwise
    a language model. A model that was no classifier gets one label."""
    chosen = language_class(config)
    needed = "language-model head"
    if description.scores == "label":
        chosen = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
        needed = "sequence classifier"
        if "SequenceClassification" not in str(config.architectures):
            config.num_labels = 1
        elif config.num_labels > 2:
            raise UserError(
                f"{description.name} has {config.num_labels} outputs, and a reranker has 1 or 2: give another reranker"
            )
    if chosen is None:
        raise UserError(
            f"Transformers has no {needed} for model_type {config.model_type!r}: use another model or another loss"
        )
    return chosen


def save_with_head(
    folder: Path,
    description: ModelDescription,
    config: PretrainedConfig,
    state: StateDict,
    head: StateDict,
) -> None:
    """Write a model with its head as Transformers does. `state`: the base model's full state dict. `head`: that of the
    head."""
    config = deepcopy(config)
    # Kernels of vembed, which Transformers does not know. The files name no kernel.
    config._attn_implementation = "eager"
    if description.scores == "answer":
        # The language-model head is not trained: that of the files, of which training reads two rows.
        head = {}
        name = "lm_head.weight"
        files = sorted(description.folder.glob("*.safetensors"))
        for path in files if not config.tie_word_embeddings else ():
            with safe_open(path, framework="pt") as file:
                if name in set(file.keys()):
                    head[name] = file.get_tensor(name)
    elif description.scores == "label":
        name_padding(config, description)
    with torch.device("meta"):
        whole = choose_class_with_head(description, config)(config)
    prefix = f"{whole.base_model_prefix}."
    weights = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    weights |= {name.removeprefix("whole."): tensor for name, tensor in head.items()}
    whole.save_pretrained(folder, state_dict=weights)


# ---- the score of a reranker -------------------------------------------------------------------------------------


def name_padding(config: PretrainedConfig, description: ModelDescription) -> None:
    """Set the config's padding token if it has none. The classifiers of decoders look for the last token that is no
    padding."""
    if config.pad_token_id is None:
        config.pad_token_id = load_tokenizer(description).pad_token_id


class ScoreHead(WholeHead):
    """The layers of a sequence classifier behind its base model."""

    def __init__(
        self,
        whole: PreTrainedModel,
        description: ModelDescription,
    ) -> None:
        """`whole`: the classifier."""
        base = whole.base_model
        pooler = getattr(base, "pooler", None)
        if pooler is not None:
            base.pooler = None
        super().__init__(whole, description, pooler)
        name_padding(whole.config, description)
        self.token = 0 if whole.config.pad_token_id else 1
        """Any token that is no padding."""

    def forward(self, states: Tensor) -> Tensor:
        """Map pooled states [n, width] to scores [n, 1]."""
        weight = next(self.whole.parameters())
        ids = torch.full((len(states), 1), self.token, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            logits = self.logits(states.to(weight.dtype)[:, None], ids)
        return one_score(logits)


def one_score(logits: Tensor) -> Tensor:
    """Map logits [n, 1 or 2] to scores [n, 1]."""
    # Of two labels the sigmoid of the difference is the second one's probability.
    if logits.shape[1] == 2:
        return logits[:, 1:] - logits[:, :1]
    return logits


class AnswerHead(nn.Module):
    """The logit of `yes` less that of `no`, of a decoder's language-model head.

    Two rows of the head's weight are read, so that logits of the whole vocabulary are never made. They stay as they
    are: where they are tied to the input embeddings, as in Qwen3-Reranker, those stay too.
    """

    def __init__(
        self,
        whole: Any,
        no: int,
        yes: int,
    ) -> None:
        """`no`, `yes`: the tokens of the answers."""
        super().__init__()
        rows = whole.get_output_embeddings().weight.detach()
        difference = rows[yes].float() - rows[no].float()
        self.difference = nn.Parameter(difference, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """Map pooled states [n, width] to scores [n, 1]."""
        with torch.autocast(states.device.type, enabled=False):
            wide = states.to(self.difference.dtype)
            return (wide * self.difference).sum(1, keepdim=True)


def build_score_head(
    description: ModelDescription, whole: PreTrainedModel
) -> ScoreHead | AnswerHead:
    """Return the head of a whole model. Its base model, whose states the head takes, is to be taken before."""
    if description.scores == "answer":
        if whole.config.tie_word_embeddings:
            whole.get_input_embeddings().requires_grad_(False)
        elif "lm_head.weight" not in read_tensors(description.folder):
            raise UserError(
                f"reranker_head: answer needs a language-model head, and the files of {description.name} have none: set "
                "reranker_head: label, or take another model"
            )
        no, yes = answer_tokens(description)
        answer_head = AnswerHead(whole, no, yes)
        refuse_changed_logits(whole, description)
        return answer_head
    if next(whole.parameters()).is_meta:
        # The process that reads the weights compares.
        head = ScoreHead(whole, description)
    else:
        head = compared_head(whole, description)
    log.info(
        "score: of %s, whose head is %s",
        type(whole).__name__,
        "new" if head.is_new else "that of its files",
    )
    return head


@torch.no_grad()
def compared_head(whole: Any, description: ModelDescription) -> ScoreHead:
    """Return the head of a classifier. Raise UserError if it does not give the classifier's own scores of two short texts:
    some read more than the state of one token."""
    whole.eval()
    base = whole.base_model
    device = next(whole.parameters()).device
    tokens = [token for token in range(13) if token != whole.config.pad_token_id]
    texts = [torch.tensor([tokens[:length]], device=device) for length in (8, 12)]
    # The kernel that is chosen may run on another device alone.
    kernel = whole.config._attn_implementation
    whole.config._attn_implementation = "eager"
    try:
        scores = [one_score(whole(input_ids=ids).logits) for ids in texts]
        head = ScoreHead(whole, description)
        states = []
        for ids in texts:
            hidden = base(input_ids=ids).last_hidden_state
            states.append(POOLINGS[description.pooling].pool(hidden, None))
        expected = torch.cat(scores)
        difference = (head(torch.cat(states)) - expected).abs().max()
    except LIBRARY_ERRORS as error:
        reason = error_sentence(error)
    else:
        whole.config._attn_implementation = kernel
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        if difference <= tolerance * expected.abs().max():
            return head
        reason = "its scores differ"
    raise UserError(
        f"{description.name} cannot be used as a reranker here: its classification head, that of "
        f"{type(whole).__name__}, does not read the pooled state alone ({reason}). Take another reranker"
    )


def refuse_changed_logits(whole: Any, description: ModelDescription) -> None:
    """Raise UserError if a model's logits are not the product of its states with the head's weight alone: scaled, capped,
    or with a bias. `whole`: a model of which nothing is needed any more."""
    layer = whole.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):
        two_rows = nn.Linear(layer.in_features, 2, bias=False)
        # Large enough to be capped.
        states = 100 * torch.randn(1, 1, layer.in_features)
    whole.set_output_embeddings(two_rows)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        logits = WholeHead(whole, description).logits(states, ids)
        product = two_rows(states)
    if layer.bias is not None or not torch.allclose(logits, product, rtol=1e-3):
        raise UserError(
            f"reranker_head: answer takes the product of states and weight as logits, and {type(whole).__name__} of "
            f"{description.name} scales it, caps it or adds a bias. Set reranker_head: label, or take another model"
        )


def answer_tokens(description: ModelDescription) -> tuple[int, int]:
    """Return the tokens of the answers no and yes: those that CrossEncoder's files name, or those of the words."""
    path = description.folder / ANSWER_SETTINGS
    if path.is_file():
        settings: AnswerSettings = read_settings(path, AnswerSettings)
        return settings.false_token_id, settings.true_token_id
    tokenizer = load_tokenizer(description)
    no = tokenizer.encode("no", add_special_tokens=False)
    yes = tokenizer.encode("yes", add_special_tokens=False)
    if len(no) != 1 or len(yes) != 1:
        raise UserError(
            f"{description.name} has no single tokens for yes and no: give a sequence classifier, or its kind"
        )
    return no[0], yes[0]


# ---- the logits of tokens ----------------------------------------------------------------------------------------


NEXT_TOKEN = "next_token"
MASKED_TOKEN = "masked_token"
"""Names of the losses: in `auxiliary_losses`, the log and metrics.jsonl."""
IGNORED_TARGET = -100
LOGIT_TOKENS = 1024
"""Tokens whose logits are held at once: those of a large vocabulary would take more memory than the model."""
MASKED_SHARE = 0.15
"""Of an encoder's tokens: the share that is to be predicted."""
KEPT_SHARE = 0.1
REPLACED_SHARE = 0.1
"""Of the tokens to be predicted: the share that stays as it is, and the share that another token replaces."""


class LanguageHead(WholeHead):
    """The layers behind the hidden states that give the logits of tokens."""

    def __init__(
        self,
        whole: PreTrainedModel,
        description: ModelDescription,
        *,
        from_scratch: bool,
    ) -> None:
        """`whole`: the model with its head, of the class that `language_class` names. `from_scratch`: the weights are
        new."""
        # A tied weight is one parameter under two names: it stays where its first name is, and is lent in the forward.
        tied = dict(whole.all_tied_weights_keys)
        for target in tied:
            holder, name = _holder(whole, target)
            holder._parameters[name] = None
        super().__init__(whole, description)
        self.tied = tied
        self.is_new |= from_scratch
        self.is_causal = is_decoder_only(whole.config)
        self.name = NEXT_TOKEN if self.is_causal else MASKED_TOKEN
        tokenizer = load_tokenizer(description)
        self.mask_token = tokenizer.mask_token_id
        self.special_tokens = torch.tensor(tokenizer.all_special_ids)
        self.vocab_size = len(tokenizer.get_vocab())
        if not self.is_causal and self.mask_token is None:
            raise UserError(
                f"loss: none hides tokens from {description.name}, an encoder, and its tokenizer has no mask token: "
                "add `mask_token` to it"
            )
        log.info(
            "language model: %s of %s, %s",
            self.name,
            type(whole).__name__,
            "whose head is new" if self.is_new else "with the head of its files",
        )

    def mask_tokens(
        self, inputs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return texts as the model gets them, and [n, tokens] targets: what the hidden state of each place must tell,
        IGNORED_TARGET where nothing is asked. An encoder's hidden tokens are drawn with torch's default generator."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        is_token = torch.ones_like(ids).bool() if mask is None else mask.bool()
        if self.is_causal:
            # The state at place i predicts token i + 1; the last one, and one before padding, predicts nothing.
            targets = torch.full_like(ids, IGNORED_TARGET)
            both = is_token[:, 1:] & is_token[:, :-1]
            targets[:, :-1] = torch.where(both, ids[:, 1:], IGNORED_TARGET)
            return inputs, targets
        is_eligible = is_token & ~torch.isin(ids, self.special_tokens.to(ids.device))
        chosen = is_eligible & (torch.rand(ids.shape, device=ids.device) < MASKED_SHARE)
        # As in BERT: 80% of the chosen tokens become the mask token, 10% another token, 10% stay and are predicted too.
        draw = torch.rand(ids.shape, device=ids.device)
        others = torch.randint(self.vocab_size, ids.shape, device=ids.device)
        masked = torch.full_like(ids, int(self.mask_token or 0))
        masked = torch.where(draw < KEPT_SHARE + REPLACED_SHARE, others, masked)
        masked = torch.where(draw < KEPT_SHARE, ids, masked)
        targets = torch.where(chosen, ids, IGNORED_TARGET)
        return {**inputs, "input_ids": torch.where(chosen, masked, ids)}, targets

    def forward(
        self,
        states: Tensor,
        targets: Tensor,
        base: nn.Module,
    ) -> Tensor:
        """Return [2, n]: for each text the sum of the tokens' cross-entropies and their number.

        `states` [n, tokens, dim]: hidden states of the base model `base`.
        """
        is_asked_for = targets != IGNORED_TARGET
        counts = is_asked_for.sum(1)
        if not bool(is_asked_for.any()):
            # A dummy: its backward must reach the same parameters as that of the other ranks.
            is_asked_for = torch.zeros_like(is_asked_for)
            is_asked_for[:, 0] = True
        rows = is_asked_for.nonzero()[:, 0]
        entropies = []
        for chunk, chunk_targets in zip(
            torch.split(states[is_asked_for], LOGIT_TOKENS),
            torch.split(targets[is_asked_for], LOGIT_TOKENS),
            strict=True,
        ):
            # Recomputed in the backward pass, so that the logits of all tokens are never held at once.
            entropies.append(
                checkpoint(
                    self._entropy, chunk, chunk_targets, base, use_reentrant=False
                )
            )
        of_tokens = torch.cat(entropies)
        sums = of_tokens.new_zeros(len(states)).index_add(0, rows, of_tokens)
        return torch.stack([sums, counts.to(sums.dtype)])

    def _entropy(
        self,
        states: Tensor,
        targets: Tensor,
        base: nn.Module,
    ) -> Tensor:
        """Return the cross-entropy of each of [m, dim] states; 0 where nothing is asked."""
        lent = []
        try:
            # Tied weights are put where the head's code looks for them.
            for target, source in self.tied.items():
                origin, origin_name = self._origin(source, base)
                holder, name = _holder(self.whole, target)
                holder._parameters[name] = origin._parameters[origin_name]
                lent.append((holder, name))
            logits = self.logits(states[None], targets[None].clamp(min=0))[0]
        finally:
            for holder, name in lent:
                holder._parameters[name] = None
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(
            logits, targets, ignore_index=IGNORED_TARGET, reduction="none"
        )

    def _origin(self, source: str, base: nn.Module) -> tuple[nn.Module, str]:
        """Return the module that holds a tied weight, and the weight's name there."""
        prefix = f"{self.base_name}."
        if source.startswith(prefix):
            return _holder(base, source.removeprefix(prefix))
        return _holder(self.whole, source)

    def lends(self, module: nn.Module, base: nn.Module) -> bool:
        """Return True if a module of the base model holds a weight that the head uses too. Sharded, it must stay
        gathered while the head runs."""
        inner = set(map(id, module.modules()))
        for source in self.tied.values():
            holder, _ = self._origin(source, base)
            if id(holder) in inner:
                return True
        return False


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a parameter, and the parameter's name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
