"""A byte-level BPE tokenizer, trained on the texts of the data: `vembed init --tokenizer`."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vembed.config.schema import DataSection, ObjectiveSection
from vembed.data.example_store import open_examples
from vembed.errors import UserError

END = "<|end|>"
PAD = "<|pad|>"
MASK_TOKEN = "<|mask|>"


def tokenizer_of_data(
    data: str,
    column_mapping: dict[str, str],
    folder: str,
    vocab_size: int,
) -> int:
    """Train a tokenizer on all texts of a data file, with or without pairs; return the number of its tokens."""
    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise UserError(
            f"--tokenizer {folder}: the folder is not empty; give a new one"
        )
    section = DataSection(data_path=data, column_mapping=column_mapping or None)
    examples = open_examples(section, data, ObjectiveSection(loss="none"))

    def texts() -> Iterable[str]:
        for example in examples:
            for item in example.items:
                if item.text is not None:
                    yield item.text

    return train_tokenizer(texts(), target, vocab_size=vocab_size)


def train_tokenizer(
    texts: Iterable[str],
    folder: Path,
    *,
    vocab_size: int,
) -> int:
    """Train a tokenizer, save it to `folder`, and return the number of its tokens. Any text is bytes, so none is
    unknown; each text ends with an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, MASK_TOKEN],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, end)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK_TOKEN,
        padding_side="right",
    )
    wrapped.save_pretrained(folder)
    return len(wrapped)
