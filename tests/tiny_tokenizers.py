"""Small tokenizers of every kind, trained on sentences of a few known words."""

import itertools
import random

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

_WORDS = (
    "red green blue small large old new fast slow warm cold cat dog bird fish horse house river mountain street city "
    "train boat bridge garden kitchen window door table chair paper letter number sort list file read write open close "
    "parse return value error string count every first last over under between from into with without the a of and or"
)
WORDS = _WORDS.split()
_VOCABULARY = [*WORDS, "find", "look", "for", "doc"]
"""With what prompts are made of, which are to leave room for the text where inputs are cut short."""
MAX_POSITIONS = 256


def texts(count, *, seed=0, shortest=2, longest=12):
    """Sentences of known words, all different, of many lengths."""
    draw = random.Random(seed)
    actual = {}
    while len(actual) < count:
        actual[" ".join(draw.choices(WORDS, k=draw.randint(shortest, longest)))] = None
    return list(actual)


def _joined(words, end=""):
    """Tokens and merges that make every word one token; a trainer's ties would fall differently in each process."""
    merges = {}
    for word in words:
        pieces = [*word[:-1], word[-1] + end]
        while len(pieces) > 1:
            pair = next(
                (pair for pair in merges if pair in set(itertools.pairwise(pieces))),
                None,
            )
            if pair is None:
                pair = (pieces[0], pieces[1])
                merges[pair] = None
            at = next(
                at for at in range(len(pieces)) if (pieces[at], pieces[at + 1]) == pair
            )
            pieces[at : at + 2] = ["".join(pair)]
    return ["".join(pair) for pair in merges], list(merges)


def _numbered(tokens):
    """The number of each token, in their order; one that occurs again has its first one."""
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def wordpiece_tokenizer(**options):
    """BERT's kind: lower case, [CLS] text [SEP]."""
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    alphabet = [chr(code) for code in range(33, 127)]
    inside = ["##" + letter for letter in alphabet]
    vocab = _numbered([*special.values(), *alphabet, *inside, *_VOCABULARY])
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **special, **options
    )


def byte_tokenizer(special, template, **options):
    """GPT's kind: byte-level pairs, the special tokens first, `template` around the text."""
    tokens, merges = _joined([*_VOCABULARY, *("Ġ" + word for word in _VOCABULARY)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = _numbered([*special, *alphabet, *tokens])
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if template != "$A":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=[
                (name, special.index(name)) for name in special if name in template
            ],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **options
    )


def roberta_tokenizer():
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    return byte_tokenizer(
        special,
        "<s> $A </s>",
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def qwen_tokenizer(**options):
    """Qwen3-Embedding's kind: the text, then end-of-text, which is the pad token too; padded on the left."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    settings = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
    } | options
    return byte_tokenizer(special, "$A <|endoftext|>", **settings)


def llama_tokenizer(**options):
    """Llama's kind: a start token, no end token and no padding token."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return byte_tokenizer(list(special.values()), "<s> $A", **special, **options)


def clip_tokenizer():
    special = ["<|startoftext|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = _joined(_VOCABULARY, end="</w>")
    letters = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    vocab = _numbered([*letters, *tokens, *special])
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def siglip_tokenizer():
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = byte_tokenizer(
        special,
        "$A <eos>",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids"],
    )
    tokenizer.model_max_length = 16
    return tokenizer


_QWEN_VL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def qwen_vl_tokenizer(padding_side):
    tokenizer = byte_tokenizer(
        _QWEN_VL_TOKENS,
        "$A",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side=padding_side,
        additional_special_tokens=_QWEN_VL_TOKENS[3:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The form of Qwen-VL's chat templates."""
