"""Writers: language models that read a document and write a query for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from vembed.data.cache import short_hash
from vembed.data_tools.config import GenerateConfig
from vembed.inference.reranker import add_padding_token, read_weights
from vembed.mining.config import Endpoint
from vembed.mining.endpoint import ChatClient
from vembed.mining.retrievers import files_identity
from vembed.mining.vectors import DTYPES
from vembed.models.families.model_files import whole_model_folder
from vembed.models.processors import open_tokenizer

PROMPTS = {
    "question": "Write one question that the document below answers.",
    "keywords": "Write a search query of two to six keywords for which the document below should be found.",
    "claim": "Write one claim in a single sentence that the document below supports.",
    "instruction": "Write one instruction to a search engine, a single sentence that describes what is wanted, for "
    "which the document below is what it should find.",
}
RULES = "Do not copy whole sentences, do not mention the document, and answer with the {noun} alone."
NOUNS = {
    "question": "question",
    "keywords": "query",
    "claim": "claim",
    "instruction": "instruction",
}
LONGEST_QUERY = 400


WriteTexts = Callable[[Sequence[str], int], Iterator[tuple[int, str]]]
"""Takes prompts and a seed, and gives the number of each prompt and what was written, in any order."""


def load_writer(config: GenerateConfig, device: torch.device) -> WriteTexts:
    """The model of `writer`: behind an endpoint, or a decoder of Transformers here."""
    writer = config.writer
    assert writer is not None, "the config asks for it"
    if writer.base_url:
        client = ChatClient(writer, writer.model)
        return lambda prompts, _: client.complete(
            prompts, writer.max_new_tokens, writer.temperature
        )
    trust = config.trust_remote_code
    folder = whole_model_folder(writer.model, option="writer")
    tokenizer = open_tokenizer(folder, padding_side="left", trust_remote_code=trust)
    add_padding_token(tokenizer)
    dtype = DTYPES.get(config.torch_dtype)
    model = read_weights(AutoModelForCausalLM, folder, dtype, trust).eval().to(device)
    # None in words: generate() warns of sampling settings that a model brings along.
    sampling: dict[str, Any] = {
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    if writer.temperature > 0:
        sampling = {"do_sample": True, "temperature": writer.temperature}

    def as_chat(prompt: str) -> str:
        if tokenizer.chat_template is None:
            return f"{prompt}\n"
        messages = [{"role": "user", "content": prompt}]
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def write(prompts: Sequence[str], seed: int) -> Iterator[tuple[int, str]]:
        texts = list(map(as_chat, prompts))
        # generate() draws from the global generator.
        torch.manual_seed(seed)
        for start in range(0, len(texts), writer.batch_size):
            inputs = tokenizer(
                texts[start : start + writer.batch_size],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=writer.max_length,
            ).to(device)
            with torch.inference_mode():
                answers = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=writer.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    **sampling,
                )
            new = answers[:, inputs["input_ids"].shape[1] :]
            written = tokenizer.batch_decode(new, skip_special_tokens=True)
            yield from enumerate(written, start)

    return write


def writer_identity(config: GenerateConfig) -> str:
    """A short name for everything that a written text depends on besides the document and the examples."""
    writer = config.writer
    assert writer is not None, "the config asks for it"
    connection = set(Endpoint.model_fields) - {"base_url"}
    names = {"language", "personas", "num_examples", "prompts"}
    return short_hash(
        writer.model if writer.base_url else files_identity(writer.model),
        writer.model_dump(exclude=connection),
        config.model_dump(include=names),
        PROMPTS,
        RULES,
    )


def prompt_for(
    kind: str,
    document: str,
    config: GenerateConfig,
    examples: Sequence[tuple[str, str]],
    number: int,
) -> str:
    """The prompt for one document. Documents take turns with the personas, and draw their examples by the seed."""
    assert config.writer is not None, "the config asks for it"
    persona = config.personas[number % len(config.personas)] if config.personas else ""
    language = config.language or "the language of the document"
    example_text = ""
    if examples and config.num_examples:
        draw = np.random.default_rng([config.seed, 2, number])
        chosen = draw.choice(
            len(examples), min(config.num_examples, len(examples)), replace=False
        )
        example_text = "\n\n".join(
            f"Document: {examples[position][1]}\n{NOUNS[kind]}: {examples[position][0]}"
            for position in chosen
        )
    # About four characters to a token; a local writer is cut exactly, by its tokenizer.
    cut = document[: 4 * config.writer.max_length]
    if kind in config.prompts:
        return config.prompts[kind].format(
            document=cut, language=language, persona=persona, examples=example_text
        )
    parts = [PROMPTS[kind]]
    if persona:
        parts.append(f"Write it as {persona} would.")
    parts += [f"Write in {language}.", RULES.format(noun=NOUNS[kind])]
    if example_text:
        parts.append(f"Examples:\n\n{example_text}\n")
    parts.append(f"Document: {cut}\n{NOUNS[kind]}:")
    return "\n".join(parts)


def cleaned(text: str) -> str:
    """Return the text without quotes, labels and anything after the first line; empty where nothing usable was."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[0]
    for noun in dict.fromkeys(NOUNS.values()):
        if line.lower().startswith(f"{noun}:"):
            line = line[len(noun) + 1 :]
    line = line.strip().strip("\"'").strip()
    return line if len(line) <= LONGEST_QUERY else ""
