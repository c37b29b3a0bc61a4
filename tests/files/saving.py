"""Saving a tiny model as a run does, and encoding with the saved folder in our way and in Sentence Transformers'."""

from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from tests import tiny
from tests.built import described, model_of
from vembed.config.schema import TrainConfig
from vembed.data.examples import Item
from vembed.data.features import Featuriser
from vembed.inference.encoding import encode_items, first_dims
from vembed.models.building import load_embedder
from vembed.saving.files import save_model


def config_of(model, **options):
    """The config of a model: a folder, or a function of tests.tiny that makes one."""
    folder = tiny.shared(model) if callable(model) else model
    return TrainConfig(model_name=str(folder), data_path="unused", **options)


def save(model, directory, *, card=None, **options):
    """Save a model, described and built with these options, to `directory`."""
    config = config_of(model, **options)
    description = described(config)
    built = model_of(config, description)
    return save_model(directory, built, built.state_dict(), card=card)


def ours(folder, items, kind="query", truncate_dim=None):
    """Embeddings by vembed's one encode path, cut after normalisation as Sentence Transformers does."""
    model = load_embedder(folder)
    whole = encoded(model, items, kind)
    size = truncate_dim or model.description.truncate_dim or whole.shape[1]
    return first_dims(whole, size, False)


def encoded(model, items, kind="query"):
    """Embeddings of texts and items by a model."""
    description = model.description
    items = [Item(text=item) if isinstance(item, str) else item for item in items]
    vectors = encode_items(model, Featuriser(description), items, kind)
    return first_dims(vectors, None, description.normalize)


def assert_same(first, second):
    """Equal to 1e-5, and not because all rows are equal."""
    np.testing.assert_allclose(first, second, atol=1e-5)
    assert len(first) == 1 or np.abs(first[:, None] - first[None]).max() > 0.01


def assert_alike(folder, texts, kind="query"):
    """Compare our embeddings of texts with those of Sentence Transformers, whose model is returned."""
    model = load_in_sentence_transformers(folder)
    encode = model.encode_query if kind == "query" else model.encode_document
    assert_same(ours(folder, texts, kind), encode(texts))
    return model


def load_in_sentence_transformers(folder):
    """The folder as somebody without vembed loads it."""
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


class NoVideos(dict[str, Any]):
    """Stands where a processor keeps its part for videos, which needs torchvision."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")


def without_torchvision(monkeypatch):
    """Let Sentence Transformers load vision-language models on a machine without torchvision: everything but videos is
    as it is."""
    if is_torchvision_available():
        return
    check = ProcessorMixin.check_argument_for_proper_class
    monkeypatch.setattr(
        AutoVideoProcessor, "from_pretrained", lambda *_, **__: NoVideos()
    )
    monkeypatch.setattr(
        ProcessorMixin,
        "check_argument_for_proper_class",
        lambda self, name, value: (
            None if name == "video_processor" else check(self, name, value)
        ),
    )
