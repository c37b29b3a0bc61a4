"""Imports of the server from which `tests.harness` forks ranks and commands. No thread may be started here."""

import gc
import importlib
import logging
import os

ARCHITECTURES = (
    "bert",
    "clip",
    "convnext",
    "dinov2",
    "distilbert",
    "gemma3",
    "gpt2",
    "llama",
    "mistral",
    "modernbert",
    "mpnet",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_vl",
    "roberta",
    "siglip",
    "siglip2",
    "t5",
    "vit",
    "xlm_roberta",
)
MODULES = [
    "numpy.testing",
    "pytest",
    "scipy.stats",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.profiler",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.tokenization_bert",
    *(f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES),
    "accelerate",
    "peft",
    "tests.tiny",
    "vembed.cli.main",
    "vembed.cli.support",
    "vembed.entrypoints.python_train",
    "vembed.pipelines.stages",
    "vembed.cli.run_train",
    "vembed.training.trainer",
]

# Transformers and peft import them, and they miss kernels of GPUs.
LIBRARIES = ("bitsandbytes", "torchao", "torch.utils._pytree")
for name in LIBRARIES:
    logging.getLogger(name).setLevel(logging.ERROR)
for name in MODULES:
    importlib.import_module(name)
for name in LIBRARIES:
    logging.getLogger(name).setLevel(logging.NOTSET)
importlib.import_module(
    "transformers.conversion_mapping"
).get_checkpoint_conversion_mapping("bert")  # fills its table
os.environ.pop("PYTHONPATH", None)  # it is for this server alone
os.fsync = lambda _: None  # as in tests/conftest.py
# Objects that a collection of a forked process would only look at, and copy their pages by doing so.
gc.collect()
gc.freeze()
