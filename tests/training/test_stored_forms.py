"""A run with quantize_embeddings scores every stored form at every size, and its report shows them."""

import vembed
from tests.training.test_run import metrics, settings


def test_scores_and_report(tmp_path):
    options = settings(
        tmp_path,
        quantize_embeddings="binary",
        mrl_dims=[16, 8],
        max_steps=2,
    )
    result = vembed.train(options)
    for form in ("float32", "int8", "binary", "binary_rescored"):
        for dim in (16, 8):
            assert f"compressed/{form}/{dim}/ndcg@10" in result.metrics
    scores = metrics(result.output_dir, "eval")
    assert "compressed/binary/8/ndcg@10" in scores[-1]
    page = (result.output_dir / "report.html").read_text()
    text = (result.output_dir / "report.md").read_text()
    assert "Stored vectors" in page and "bytes per document" in page
    assert "## Stored vectors" in text and "| binary, rescored | 16 | 2 |" in text
