"""Imports of the server from which `tests.harness` forks ranks and commands. Nothing else may run here."""

from __future__ import annotations

import gc
import importlib
import os

MODULES = [
    "numpy.testing",
    "pytest",
    "scipy.stats",
    "sklearn.utils",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen3.modeling_qwen3",
    "accelerate",
    "tests.tiny",
    "vembed.cli",
    "vembed.cli_support",
    "vembed.entrypoints.python_train",
    "vembed.stages.sequence",
    "vembed.tools.train_command",
    "vembed.training.run",
]

for name in MODULES:
    importlib.import_module(name)
os.environ.pop("PYTHONPATH", None)  # it is for this server alone
# Objects that a collection of a forked process would only look at, and copy their pages by doing so.
gc.collect()
gc.freeze()
