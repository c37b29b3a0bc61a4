"""The commands as a user meets them: exit codes, messages, dry runs of the documents' commands."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.commands import command
from tests.tiny import shared, tiny_bert
from vembed.config.loading import load_config
from vembed.config.options import all_options
from vembed.entrypoints.python_train import train
from vembed.errors import UserError

ROOT = Path(__file__).parents[2]
STAGES = "model_name: m\ndata_path: d\ntraining_stages:\n  one: {epochs: 1}\n  two: {epochs: 2}\n"


def test_help_loads_nothing_heavy(process):
    code = (
        "import sys\nfrom vembed.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = process("-c", code)
    for name in ("train", "eval", "encode", "demo", "doctor", "init", "schema"):
        assert f" {name} " in done.out


def test_a_mistyped_key_is_exit_code_2_and_one_sentence(process):
    Path("cfg.yaml").write_text("model_name: m\ndata_path: d\n\nlearning_rat: 1e-5\n")
    done = process("-m", "vembed", "train", "cfg.yaml", code=2)
    (line,) = done.err.splitlines()
    assert "cfg.yaml, line 4" in line and "'learning_rate'" in line


def test_a_mistyped_path_is_named_with_the_one_that_is_meant(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("my-model").mkdir()
    Path("train.csv").write_text("query,positive\na,b\n")
    refused("train model_name=my-modell data_path=train.csv", "my-model?")
    words = f"model_name={shared(tiny_bert)} data_path=./trian.csv"
    for name in ("train", "config"):
        refused(f"{name} {words}", "./trian.csv", "train.csv?")


def test_usage_and_help(vembed, refused):
    for words in ("trian", "train", "eval", "train nowhere.yaml"):
        refused(words)
    refused("encode model texts.txt", "OUTPUT")
    for name in ("train", "config", "plan"):
        assert f"{name} [OPTIONS] [CFG" in vembed(name, "--help").out
    for words in ("version", "--version"):
        assert vembed(words).out.startswith("vembed 0")


@pytest.mark.promise("D01", "D21", "D22")
def test_dry_run_resolves_everything_without_torch(process):
    Path("cfg.yaml").write_text(
        "model_name: Qwen/Qwen3-VL-Embedding-8B\ndata_path: data/train.jsonl\nbatch_size: 16\nuse_fsdp: true\n"
        "use_lora: true\nfsdp_backward_prefetch: BACKWARD_PRE\nlr: 2.0e-5\n"
    )
    done = process("-m", "vembed", "train", "cfg.yaml", "--nproc", "4", "--dry-run")
    for line in (
        "model_name: Qwen/Qwen3-VL-Embedding-8B  # cfg.yaml:1",
        "learning_rate: 2.0e-05  # cfg.yaml:7",
        "num_processes: 4  # command line",
        "strategy: fsdp",
        "fsdp: version 2, FULL_SHARD, TRANSFORMER_BASED_WRAP (configs/accelerate_fsdp.yaml)",
        "gradient checkpointing: true (default with FSDP)",
        "world size: 4 = 4 process(es) (num_processes)",
        "global batch: 64 = 4 x 16 examples",
        "data_path: data/train.jsonl (not here: a name on the Hub, or a path that is missing)",
    ):
        assert line in done.out.splitlines(), line
    assert "fsdp_backward_prefetch: BACKWARD_PRE" in done.out
    assert (
        "would run: python -m vembed.entrypoints.train --config=cfg.yaml --set=nproc=4 (ranks 0 to 3 of 4"
        in done.out
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--fsdp-config single_node_fsdp",
            "world size: 8 = 8 process(es) (configs/single_node_fsdp.yaml)",
        ),
        (
            "--fsdp-config multi_node_fsdp --num-nodes 2 --devices 8",
            "world size: 16 = 8 process(es) on each of 2 machines",
        ),
        (
            "--accelerate-config accelerate_hsdp",
            "fsdp: version 2, HYBRID_SHARD, TRANSFORMER_BASED_WRAP",
        ),
        (
            "--accelerate-config accelerate_fsdp1 --nproc 2",
            "fsdp: version 1, FULL_SHARD, TRANSFORMER_BASED_WRAP",
        ),
        (
            "--accelerate-config accelerate_fsdp_offload --nproc 2",
            "_WRAP, offloaded to host memory (configs/accelerate_fs",
        ),
        ("--use-fsdp true", "strategy: single (one process, although fsdp was"),
        ("--nproc 2", "strategy: auto (decided by the size of the model"),
        ("--effective-batch-size 256 --nproc 8", "global batch: 256 = 8 x 32 examples"),
        (
            "--fsdp-config configs/large_scale_fsdp.yaml --machine-rank 3 --main-process-ip 10.0.0.1",
            "ranks 24 to 31 of 64, main process at 10.0.0.1, port 29500",
        ),
    ],
)
@pytest.mark.promise("C14", "C15", "C16", "C17", "C18", "C19", "C33", "E26")
def test_dry_runs_of_the_documents(vembed, cfg, words, expected):
    before = Path(cfg).read_text()
    done = vembed(f"train {cfg} {words} --dry-run")
    assert expected in done.out
    assert Path(cfg).read_text() == before, "the user's YAML stays as it is"


@pytest.mark.parametrize(
    ("words", "option"),
    {
        "--fsdp-config single_node": "'single_node' is neither a file nor a preset",
        "global_batch_size=10 --nproc 3": "global_batch_size: 10",
        "strategy=single --nproc 2": "strategy: single is one process, but 2",
        "--stage stage1": "no training_stages block",
        "use_fsdp=true fsdp_state_dict_type=local_state_dict": "SHARDED_STATE_DICT",
    }.items(),
)
@pytest.mark.promise("C18", "E12", "E26")
def test_what_cannot_be_started_is_said_first(refused, cfg, words, option):
    refused(f"train {cfg} {words} --dry-run", "error: ", option)


def test_the_number_of_this_machine_is_needed_for_a_run_alone(vembed, refused, cfg):
    words = f"train {cfg} --num-machines 2 --nproc 2"
    vembed(f"{words} --dry-run")
    refused(words, "--machine-rank and --main-process-ip")


@pytest.mark.promise("A08", "A11")
def test_everything_on_the_command_line(vembed, refused):
    words = "train --use-fsdp true --model some/model --data d.jsonl --nproc 2"
    done = vembed(words, "--dry-run")
    assert "model_name: some/model  # command line" in done.out
    printed = "--set=use_fsdp=true --set=model=some/model --set=data=d.jsonl"
    assert printed in done.out
    refused("train --model x", "data_path is missing")


@pytest.mark.promise("B26", "C26")
def test_machines_in_the_environment(vembed, refused, cfg, monkeypatch):
    words = f"train {cfg} --dry-run"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(words, "WORLD_SIZE=2 is set, but not LOCAL_RANK")
    # What a cluster system sets for each machine does not matter once the flags say it.
    flags = "--num-machines 2 --machine-rank 1 --main-process-ip host --nproc 2"
    done = vembed(f"{words} {flags}")
    assert "ranks 2 to 3 of 4, main process at host" in done.out
    monkeypatch.setenv("LOCAL_RANK", "0")
    refused(words, "MASTER_ADDR and MASTER_PORT are not set")
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "world size: 2 = 2 process(es) (set by the launcher)" in vembed(words).out


def test_accelerate_launch_without_gpus_says_what_to_type(vembed, cfg, monkeypatch):
    """Accelerate then starts one process, without a rank, however many were asked for."""
    options = "--num_processes 2 --mixed_precision no --num_machines 1 --dynamo_backend no -m vembed.entrypoints.train"
    words = [*options.split(), cfg, "--dry-run"]
    done = command(*words, module="accelerate.commands.launch", code=1)
    assert "MASTER_ADDR=127.0.0.1" in done.stderr and "--nproc N" in done.stderr
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    words = f"train {cfg} --dry-run"
    assert "world size: 1 = 1 process(es)" in vembed(words).out
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "world size: 2 = 2 process(es)" in vembed(words, "--nproc=2").out


@pytest.mark.promise("C20")
def test_a_stage_needs_the_one_before_it(vembed, refused):
    Path("cfg.yaml").write_text(STAGES)
    said = "output/one/final (cfg.yaml, result of one)"
    refused("train cfg.yaml --stage two", said)
    printed = vembed("config cfg.yaml --stage two").out
    assert "model_name: output/one/final  # cfg.yaml, result of one" in printed
    with pytest.raises(UserError, match=r"output/one/final \(the config, result of"):
        train(yaml.safe_load(STAGES), ["stage=two"])


@pytest.mark.promise("D04")
def test_the_entry_point_works_as_a_file_of_a_checkout(process):
    Path("cfg.yaml").write_text("model_name: m\ndata_path: d\n")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vembed", "checkout/vembed", symlinks=True, ignore=ignored)
    shutil.copytree(ROOT / "configs", "checkout/configs")
    template = Path("checkout/vembed/evaluation/report/templates/dry_run.txt.j2")
    text = template.read_text().replace("would run: ", "the checkout: ")
    template.write_text(text)
    words = ("cfg.yaml", "epochs=2", "use_fsdp=true", "--dry-run")
    done = process("checkout/vembed/entrypoints/train.py", *words)
    assert "epochs: 2.0  # command line" in done.out
    assert "the checkout: " in done.out, "not the vembed that is installed"


def test_the_entry_point_stays_one_process_unless_asked(process, monkeypatch):
    Path("cfg.yaml").write_text("model_name: m\ndata_path: d\n")
    words = ["-m", "vembed.entrypoints.train", "cfg.yaml", "--dry-run"]
    assert "world size: 1 = 1 process(es) (started as one)" in process(*words).out
    words += ["--devices", "8", "--precision", "bf16-mixed"]
    assert "world size: 8 = 8 process(es) (num_processes)" in process(*words).out
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "world size: 1 = 1 process(es) (set by the launcher)" in process(*words).out


def test_config_shows_origins_and_is_a_config_itself(vembed, refused, cfg):
    options = ["lr=1e-5", "loss=triplet", "temperature=0.1"]
    words = f"config {cfg} {' '.join(options)}"
    refused(words, "data_path: train.jsonl does not exist")
    Path("train.jsonl").touch()
    # Before the data are read, which may take minutes.
    for name in ("config", "train"):
        wrong = "val_data_path=val.csv model_name=./m image_root=pictures"
        done = refused(f"{name} {cfg} {wrong}", "also: model_name: ./m is not a folder")
        assert done.err.count(" does not exist") == 2
    done = vembed(words)
    assert "learning_rate: 1.0e-05  # command line" in done.out
    assert "# note: temperature: 0.1 has no effect with loss: triplet" in done.out
    Path("again.yaml").write_text(done.out)
    again = load_config("again.yaml").to_dict()
    assert again == load_config(cfg, options).to_dict()


def test_schema_is_json_for_editors(vembed):
    schema = json.loads(vembed("schema").out)
    assert list(schema["properties"]) == list(all_options())
    assert schema["required"] == ["model_name", "data_path"]
    assert all("description" in entry for entry in schema["properties"].values())
    assert vembed("schema --format markdown").out.startswith("# Options\n")


@pytest.mark.parametrize(
    ("words", "option"),
    {
        "eval m d --dims a,b": "--dims",
        "encode m i o.npy --kind x": "--kind",
        "encode m i o.npy --layers 1 --pooling x": "--pooling",
        "mine x.yaml --nproc two": "--nproc",
        "export m o --format onx": "'--format': 'onx' is not one of",
        "merge a b -o c --method tise": "did you mean 'ties'?",
    }.items(),
)
def test_wrong_values_name_their_option(refused, words, option):
    refused(words, option)
