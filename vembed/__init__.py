"""vembed: fine-tune embedding models from one YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Embedder",
    "Reranker",
    "UserError",
    "__version__",
    "audit",
    "edit",
    "evaluate",
    "fsdp_empty_cache",
    "fsdp_print_memory_usage",
    "generate",
    "judge",
    "load_config",
    "merge",
    "mine",
    "train",
    "unify_model_dtype_for_fsdp",
]

if TYPE_CHECKING:
    from vembed.config.loading import load_config
    from vembed.data_tools.audit import audit
    from vembed.data_tools.generate import generate
    from vembed.entrypoints.python_train import train
    from vembed.errors import UserError
    from vembed.evaluation.scores import evaluate
    from vembed.inference.embedder import Embedder
    from vembed.inference.reranker import Reranker
    from vembed.mining.judges import judge
    from vembed.mining.mine import mine
    from vembed.parallel.devices import fsdp_empty_cache, fsdp_print_memory_usage
    from vembed.parallel.parameters import unify_model_dtype_for_fsdp
    from vembed.weights.edit import edit
    from vembed.weights.merge import merge

_HOME = {
    "Embedder": "vembed.inference.embedder",
    "Reranker": "vembed.inference.reranker",
    "UserError": "vembed.errors",
    "audit": "vembed.data_tools.audit",
    "edit": "vembed.weights.edit",
    "evaluate": "vembed.evaluation.scores",
    "fsdp_empty_cache": "vembed.parallel.devices",
    "fsdp_print_memory_usage": "vembed.parallel.devices",
    "generate": "vembed.data_tools.generate",
    "judge": "vembed.mining.judges",
    "load_config": "vembed.config.loading",
    "merge": "vembed.weights.merge",
    "mine": "vembed.mining.mine",
    "train": "vembed.entrypoints.python_train",
    "unify_model_dtype_for_fsdp": "vembed.parallel.parameters",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import vembed` does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'vembed' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
