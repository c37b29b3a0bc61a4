"""examples/notebook.ipynb: its cells run in order; here with a tiny model."""

from tests.docs.pages import ROOT
from tests.tiny import read_json, shared, tiny_bert_st


def test_the_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(
        "vembed.cli.commands.demo.demo_model", lambda: shared(tiny_bert_st)
    )
    path = ROOT / "examples" / "notebook.ipynb"
    notebook = read_json(path)
    assert notebook["nbformat"] == 4
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "saved without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    assert names["result"].metrics["ndcg@10"] > 0
    assert names["bits"].nbytes * 32 == names["documents"].nbytes
    assert "bytes as float32" in capsys.readouterr().out
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["examples", "output"]
