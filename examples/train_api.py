"""Fine-tuning from Python, and use of the result. Runs without changes:

    python examples/train_api.py                                        one process, with the sample data
    torchrun --nproc_per_node 2 examples/train_api.py                   two processes; on a CPU as well
    python examples/train_api.py my/model my.jsonl use_fsdp=true        another model, other data, any option

Every process runs the whole script. `vembed.train` joins them, wraps the model (replicas or shards), builds the
optimizer after wrapping, trains, saves, and always ends the process group.
"""

import os
import sys
from pathlib import Path

import vembed

DATA = Path(__file__).parent / "data"


def main() -> None:
    """Train, and search with the result."""
    model = (
        sys.argv[1] if len(sys.argv) > 1 else "sentence-transformers/all-MiniLM-L6-v2"
    )
    data = sys.argv[2] if len(sys.argv) > 2 else str(DATA / "train.jsonl")
    config = {
        "model_name": model,
        "data_path": data,
        "val_data_path": str(DATA / "val.jsonl"),
        "output_dir": "runs/train_api",
        "batch_size": 32,  # per process; the loss sees the negatives of all
        "epochs": 1,
        "learning_rate": 1e-4,
        "resume": "auto",  # resumes from a checkpoint if there is one
    }

    # A dict, a path to a YAML file or a TrainConfig; then key=value, as on the command line.
    result = vembed.train(config, sys.argv[3:])

    if int(os.environ.get("RANK", "0")) == 0:
        print(f"steps: {result.steps}, model: {result.model_dir}")
        print(
            f"nDCG@10: {result.metrics['before/ndcg@10']:.3f} -> {result.metrics['ndcg@10']:.3f}"
        )

        embedder = vembed.Embedder(result.model_dir)
        documents = ["Paris is the capital of France.", "Rome is the capital of Italy."]
        queries = embedder.encode(["what is the capital of italy"], kind="query")
        print(embedder.similarity(queries, embedder.encode(documents, kind="document")))


if __name__ == "__main__":
    main()
