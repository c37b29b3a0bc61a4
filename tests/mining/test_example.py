"""examples/mine: one command mines, a second trains, on the demo's data with a tiny model."""

import vembed
from tests.docs.pages import ROOT
from tests.mining.data import documents, model, pairs_of, write_jsonl
from vembed.mining.options import MineConfig, load_options

FOLDER = ROOT / "examples" / "mine"


def test_one_command_mines_and_a_second_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "data").mkdir(parents=True)
    rows = pairs_of(documents()[:80])
    write_jsonl(tmp_path / "demo" / "data" / "train.jsonl", rows[:64])
    write_jsonl(tmp_path / "demo" / "data" / "val.jsonl", rows[64:])
    config = load_options(
        MineConfig,
        FOLDER / "mine.yaml",
        [f"model_name={model()}", "relative_margin=0.012"],
    )
    mined = vembed.mine(config)
    assert mined.num_negatives > 64
    result = vembed.train(
        FOLDER / "train.yaml", [f"model_name={model()}", "report_to=none"]
    )
    assert result.steps == 2
