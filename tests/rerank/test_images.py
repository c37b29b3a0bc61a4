"""task: rerank of a vision-language model: texts and images as documents, scored as Qwen3-VL-Reranker is published."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

import vembed
from tests.data.files import pair, write_jsonl
from tests.rerank.test_rerank import succeeds, trained
from tests.tiny import shared, tiny_qwen3_vl
from vembed.data.features import ANSWER_PROMPT, IMAGE_ANSWER_END
from vembed.errors import UserError
from vembed.models.families.description import IMAGE_INSTRUCTION
from vembed.saving.files import write_reranker_layout

QUERY = "red cat"


def published(folder):
    """A Qwen3-VL-Reranker: a vision-language model with the tokens yes and no."""
    source = shared(tiny_qwen3_vl)
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["yes", "no"])
    model = AutoModelForImageTextToText.from_pretrained(source)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    # New rows are nearly the mean of all, so all scores would be nearly 0.
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "config_sentence_transformers.json"
    settings.write_text('{"model_type": "CrossEncoder"}')
    return folder


def images(folder, count):
    paths = []
    for number in range(count):
        size = (64 + 32 * (number % 3), 64)
        paths.append(folder / f"{number}.png")
        Image.new("RGB", size, (40 * number % 255, 90, 200)).save(paths[-1])
    return paths


def documents(folder):
    first, second = images(folder, 2)
    both = {"text": "a red cat sleeps", "image": str(second)}
    return ["a red cat sleeps", first, both]


def plain_scores(model_folder, listed):
    """Return the scores of QUERY's documents in Transformers, each alone."""
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    processor = AutoImageProcessor.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    scores = []
    for document in listed:
        text = "" if isinstance(document, Path) else document
        image = None if isinstance(document, str) else document
        if isinstance(document, dict):
            text = document["text"]
            image = document["image"]
        inputs = {}
        if image is not None:
            inputs = dict(processor(images=[Image.open(image)], return_tensors="pt"))
            # Four patches become one token.
            num_tokens = int(inputs["image_grid_thw"].prod()) // 4
            text = f"<|vision_start|>{'<|image_pad|>' * num_tokens}<|vision_end|>{text}"
        body = f"<Instruct>: {IMAGE_INSTRUCTION}<Query>:{QUERY}\n<Document>:{text}"
        whole = ANSWER_PROMPT + body + IMAGE_ANSWER_END
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt").input_ids
        types = (ids == model.config.image_token_id).int()
        inputs |= {"input_ids": ids, "mm_token_type_ids": types}
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        scores.append(float(logits[yes] - logits[no]))
    return scores


def test_lists_with_images_are_sorted_by_the_command(tmp_path):
    model = published(tmp_path / "published")
    expected = plain_scores(model, documents(tmp_path))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    names = [image.name for image in images(pictures, 2)]
    both = {"text": "a red cat sleeps", "image": names[1]}
    listed = ["a red cat sleeps", {"image": names[0]}, both]
    record = {"query": QUERY, "documents": listed, "score": "no number"}
    for root, options in ((tmp_path, ("--image-root", pictures)), (pictures, ())):
        path = root / "lists.jsonl"
        write_jsonl(path, [record])
        ranking = json.loads(succeeds("rerank", model, path, *options))["results"]
        for row in ranking:
            assert row["score"] == pytest.approx(expected[row["index"]], abs=1e-5)
        assert [row["index"] for row in ranking if "text" in row] == [0]


def test_it_is_trained_on_images_and_saved(tmp_path):
    model = published(tmp_path / "published")
    paths = images(tmp_path, 12)
    records = []
    for number, path in enumerate(paths):
        record = pair(f"picture {number}", {"image": str(path)})
        record["negatives"] = [{"image": str(paths[number - 1])}]
        records.append(record)
    data = tmp_path / "train.jsonl"
    write_jsonl(data, records)
    final = trained(tmp_path, model, data_path=str(data), batch_size=4, max_steps=2)
    listed = documents(tmp_path)
    expected = plain_scores(final, listed)
    scores = vembed.Reranker(final).predict([(QUERY, document) for document in listed])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(plain_scores(model, listed), abs=1e-4)


def test_two_processes_score_texts_and_images(tmp_path):
    model = published(tmp_path / "published")
    (picture,) = images(tmp_path, 1)
    # One process has the only image: with shards, the other runs a made one.
    records = [
        pair(QUERY, "a red cat sleeps"),
        pair(QUERY, {"image": str(picture)}),
        pair("blue", "a dog"),
    ]
    pairs = tmp_path / "pairs.jsonl"
    write_jsonl(pairs, records)
    shares = ["--nproc", 2, "--strategy", "fsdp"]
    lines = succeeds("score", model, pairs, *shares).splitlines()
    assert len(lines) == 3
    expected = plain_scores(model, ["a red cat sleeps", picture])
    assert list(map(float, lines[:2])) == pytest.approx(expected, abs=1e-5)


def test_the_question_is_saved_as_a_template(tmp_path):
    reranker = vembed.Reranker(published(tmp_path / "published"))
    write_reranker_layout(tmp_path, reranker.description)
    template = (tmp_path / "chat_template.jinja").read_text()
    content = [{"type": "image"}, {"type": "text", "text": 'a "cat"'}]
    messages = [
        {"role": "query", "content": [{"type": "text", "text": QUERY}]},
        {"role": "document", "content": content},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "published")
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False
    )
    document = '<|vision_start|><|image_pad|><|vision_end|>a "cat"'
    body = f"<Instruct>: {IMAGE_INSTRUCTION}<Query>:{QUERY}\n<Document>:{document}"
    assert rendered == ANSWER_PROMPT + body + IMAGE_ANSWER_END


def test_a_label_is_for_texts(tmp_path):
    with pytest.raises(UserError, match="reranker_head"):
        vembed.Reranker(published(tmp_path / "published"), head="label")
