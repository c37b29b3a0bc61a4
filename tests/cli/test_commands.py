"""The verbs as a user meets them: exit codes, messages, dry runs of the documents' commands, starter configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.commands import command
from tests.tiny import shared, tiny_bert
from vembed.config.loading import load_config
from vembed.config.options import all_options
from vembed.errors import UserError
from vembed.models.families.table import FAMILIES
from vembed.training.run import train

ROOT = Path(__file__).parents[2]


def test_help_loads_nothing_heavy(process: Command) -> None:
    code = (
        "import sys\nfrom vembed.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = process("-c", code)
    assert done.code == 0, done.err
    assert all(
        verb in done.out
        for verb in (
            "train",
            "eval",
            "encode",
            "demo",
            "doctor",
            "init",
            "config",
            "schema",
        )
    )


def test_a_mistyped_key_is_exit_code_2_and_one_sentence(process: Command) -> None:
    Path("cfg.yaml").write_text(
        "model_name: m\ndata_path: d\n\n\n\n\nlearning_rat: 1e-5\n"
    )
    for words in (
        ["-m", "vembed", "train", "cfg.yaml"],
        ["-m", "vembed.entrypoints.train", "cfg.yaml"],
    ):
        done = process(*words)
        assert done.code == 2
        assert (
            done.err
            == "error: cfg.yaml, line 7: unknown option 'learning_rat', did you mean 'learning_rate'?\n"
        )


def test_a_mistyped_path_is_named_with_the_one_that_is_meant(
    vembed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("my-model").mkdir()
    Path("train.csv").write_text("query,positive\na,b\n")
    done = vembed("train", "model_name=my-modell", "data_path=train.csv")
    assert done.code == 2 and done.err.endswith(
        "while online; did you mean my-model?\n"
    ), done.err
    for verb in ("train", "config"):
        done = vembed(verb, f"model_name={shared(tiny_bert)}", "data_path=./trian.csv")
        assert (
            done.code == 2
            and "./trian.csv does not exist" in done.err
            and "did you mean train.csv?" in done.err
        )


def test_usage_is_exit_code_2(vembed: Command) -> None:
    assert vembed("trian").code == 2
    assert vembed("train").code == 2
    assert vembed("eval").code == 2
    assert vembed("train", "nowhere.yaml").code == 2
    assert "Missing argument 'OUTPUT'" in vembed("encode", "model", "texts.txt").err
    assert vembed("train", "--help").code == 0
    assert vembed("version").out.startswith("vembed 0")


def test_train_shows_its_own_help(vembed: Command) -> None:
    done = vembed("train", "--help")
    assert done.out.startswith("Usage: vembed train CFG")
    assert done.code == 0


@pytest.mark.promise("D01", "D21", "D22")
def test_dry_run_resolves_everything_without_torch(process: Command) -> None:
    text = "model_name: Qwen/Qwen3-VL-Embedding-8B\ndata_path: data/train.jsonl\nbatch_size: 16\nuse_fsdp: true\n"
    Path("cfg.yaml").write_text(
        text + "use_lora: true\nfsdp_backward_prefetch: BACKWARD_PRE\nlr: 2.0e-5\n"
    )
    done = process("-m", "vembed", "train", "cfg.yaml", "--nproc", "4", "--dry-run")
    assert done.code == 0, done.err
    for line in (
        "model_name: Qwen/Qwen3-VL-Embedding-8B  # cfg.yaml:1",
        "learning_rate: 2.0e-05  # cfg.yaml:7",
        "num_processes: 4  # command line",
        "translated: lr: 2e-05 -> learning_rate: 2e-05 (cfg.yaml, line 7)",
        "strategy: fsdp",
        "fsdp: version 2, FULL_SHARD, TRANSFORMER_BASED_WRAP (configs/accelerate_fsdp.yaml)",
        "gradient checkpointing: true (default with strategy: fsdp)",
        "world size: 4 = 4 process(es) (num_processes)",
        "global batch: 64 = 4 x 16 examples",
        "data: data/train.jsonl (not here: a name on the Hub, or a path that is missing)",
        "# All other options have their defaults; --all lists them.",
    ):
        assert line in done.out.splitlines(), line
    assert (
        "note: fsdp_backward_prefetch: BACKWARD_PRE has no effect under FSDP2"
        in done.out
    )
    assert (
        "would run: python -m vembed.entrypoints.train --config=cfg.yaml --set=num_processes=4 (ranks 0 to 3 of 4"
        in done.out
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--fsdp-config single_node_fsdp --devices 4",
            "world size: 4 = 4 process(es) (num_processes)",
        ),
        (
            "--fsdp-config single_node_fsdp",
            "world size: 8 = 8 process(es) (configs/single_node_fsdp.yaml)",
        ),
        (
            "--fsdp-config multi_node_fsdp --num-nodes 2 --devices 8",
            "world size: 16 = 8 process(es) on each of 2 machines",
        ),
        (
            "--accelerate-config large_scale_fsdp --num-nodes 4",
            "world size: 32 = 8 process(es) on each of 4 machines",
        ),
        (
            "--fsdp-config multi_node_fsdp",
            "world size: 32 = 8 process(es) on each of 4 machines (configs/multi_node",
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
        (
            "--accelerate-config single_node_fsdp",
            "gradient checkpointing: true (configs/single_node_fsdp.yaml)",
        ),
        ("--accelerate-config accelerate_ddp --nproc 2", "strategy: ddp"),
        (
            "--use-fsdp true",
            "strategy: single (one process, although fsdp was asked for)",
        ),
        (
            "--nproc 2",
            "strategy: auto (decided by the size of the model: ddp where it fits, fsdp where it does not)",
        ),
        ("--effective-batch-size 256 --nproc 8", "global batch: 256 = 8 x 32 examples"),
        ("strategy=ddp nproc=2", "strategy: ddp"),
        (
            "--accelerate-config accelerate_ddp --num-nodes 4 --devices 8 sync_batchnorm=true",
            "world size: 32 = 8 process(es) on each of 4 machines",
        ),
        (
            "--fsdp-config configs/large_scale_fsdp.yaml --machine-rank 3 --main-process-ip 10.0.0.1",
            "ranks 24 to 31 of 64, main process at 10.0.0.1, port 29500",
        ),
    ],
)
@pytest.mark.promise("C14", "C15", "C16", "C17", "C18", "C19", "C33", "E26")
def test_dry_runs_of_the_documents(
    vembed: Command, cfg: str, words: str, expected: str
) -> None:
    done = vembed("train", cfg, *words.split(), "--dry-run")
    assert done.code == 0, done.err
    assert expected in done.out
    assert (
        Path(cfg).read_text() == "model_name: some/model\ndata_path: train.jsonl\n"
    ), "the user's YAML stays as it is"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--fsdp-config single_node",
            "'single_node' is neither a file nor a preset (accelerate_ddp, accelerate_fsdp",
        ),
        (
            "global_batch_size=10 --nproc 3",
            "global_batch_size: 10 cannot be divided among 3 processes: use 9 or 12",
        ),
        (
            "strategy=single --nproc 2",
            "strategy: single is one process, but 2 were asked for",
        ),
        (
            "--num-machines 2 --nproc 2",
            "num_machines: 2 needs --machine-rank and --main-process-ip",
        ),
        (
            "--num-machines 2 --machine-rank 2 --main-process-ip a",
            "--machine-rank 2 must be below num_machines: 2",
        ),
        (
            "--stage stage1",
            "stage 'stage1' was asked for, but there is no training_stages block",
        ),
        (
            "use_fsdp=true fsdp_state_dict_type=local_state_dict --dry-run",
            "use SHARDED_STATE_DICT",
        ),
    ],
)
@pytest.mark.promise("C18", "E12", "E26")
def test_what_cannot_be_started_is_said_first(
    vembed: Command, cfg: str, words: str, sentence: str
) -> None:
    done = vembed("train", cfg, *words.split())
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert sentence in done.err


@pytest.mark.promise("A08", "A11")
def test_everything_on_the_command_line(vembed: Command) -> None:
    done = vembed(
        "train",
        "--use-fsdp",
        "true",
        "--model",
        "some/model",
        "--data",
        "d.jsonl",
        "--nproc",
        "2",
        "--dry-run",
    )
    assert done.code == 0, done.err
    assert "model_name: some/model  # command line" in done.out
    assert (
        "--set=use_fsdp=true --set=model_name=some/model --set=data_path=d.jsonl"
        in done.out
    )
    assert (
        "data_path is missing: give a config file, or data_path=..."
        in vembed("train", "--model", "x").err
    )


def test_help_and_version_of_the_rest(vembed: Command) -> None:
    for verb in ("config", "plan"):
        done = vembed(verb, "--help")
        assert done.code == 0 and done.out.startswith(f"Usage: vembed {verb} CFG")
    assert vembed("--version").out.startswith("vembed 0")


@pytest.mark.promise("B26", "C26")
def test_machines_in_the_environment(
    vembed: Command, cfg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    done = vembed("train", cfg, "--dry-run")
    assert done.code == 2
    assert "WORLD_SIZE=2 is set, but not LOCAL_RANK" in done.err
    # What a cluster system sets for each machine does not matter once the flags say it.
    flags = (
        "--num-machines",
        "2",
        "--machine-rank",
        "1",
        "--main-process-ip",
        "host",
        "--nproc",
        "2",
    )
    assert (
        "ranks 2 to 3 of 4, main process at host"
        in vembed("train", cfg, *flags, "--dry-run").out
    )
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (
        "MASTER_ADDR and MASTER_PORT are not set"
        in vembed("train", cfg, "--dry-run").err
    )
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert (
        "world size: 2 = 2 process(es) (set by the launcher)"
        in vembed("train", cfg, "--dry-run").out
    )


def test_accelerate_launch_without_gpus_says_what_to_type(
    vembed: Command, cfg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate then starts one process, without a rank, however many were asked for."""
    options = [
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--num_machines",
        "1",
        "--dynamo_backend",
        "no",
    ]
    words = [*options, "-m", "vembed.entrypoints.train", cfg, "--dry-run"]
    done = command(*words, module="accelerate.commands.launch")
    assert done.returncode != 0
    assert (
        "error: accelerate launch was asked for several processes (MASTER_ADDR=127.0.0.1 is set)"
        in done.stderr
    )
    assert "run `vembed train CONFIG --nproc N`" in done.stderr
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "world size: 1 = 1 process(es)" in vembed("train", cfg, "--dry-run").out
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert (
        "world size: 2 = 2 process(es)"
        in vembed("train", cfg, "--nproc", "2", "--dry-run").out
    )


@pytest.mark.promise("C20")
def test_a_stage_needs_the_one_before_it(vembed: Command) -> None:
    Path("cfg.yaml").write_text(
        "model_name: m\ndata_path: d\ntraining_stages:\n  one: {epochs: 1}\n  two: {epochs: 2}\n"
    )
    done = vembed("train", "cfg.yaml", "--stage", "two")
    assert done.code == 2
    assert (
        "output/one/final (cfg.yaml, result of one) is not there: train that stage first"
        in done.err
    )
    assert (
        "model_name: output/one/final  # cfg.yaml, result of one"
        in vembed("config", "cfg.yaml", "--stage", "two").out
    )


def test_a_stage_that_is_moved_says_where_it_starts_from(vembed: Command) -> None:
    Path("cfg.yaml").write_text(
        "model_name: m\ndata_path: d\ntraining_stages:\n  one: {epochs: 1}\n  two: {epochs: 2}\n"
    )
    said = vembed(
        "train", "cfg.yaml", "--stage", "two", "output_dir=new", "--dry-run"
    ).out
    assert (
        "note: output_dir: new (command line) is this stage's folder alone: it starts from output/one/final "
        in said
    )
    assert "model_name=FOLDER/final starts from another run of that stage" in said
    for words in (
        ("--stage", "two"),
        ("--stage", "one", "output_dir=new"),
        ("--stage", "two", "model_name=m"),
    ):
        assert (
            "folder alone" not in vembed("train", "cfg.yaml", *words, "--dry-run").out
        )


def test_a_stage_needs_the_one_before_it_in_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = {
        "model_name": "m",
        "data_path": "d",
        "training_stages": {"one": {"epochs": 1}, "two": {"epochs": 2}},
    }
    with pytest.raises(
        UserError,
        match=r"output/one/final \(the config, result of one\) is not there: train that sta",
    ):
        train(stages, ["stage=two"])


@pytest.mark.promise("D04")
def test_the_entry_point_works_as_a_file_of_a_checkout(
    process: Command, tmp_path: Path
) -> None:
    Path("cfg.yaml").write_text("model_name: m\ndata_path: d\n")
    shutil.copytree(
        ROOT / "vembed",
        "checkout/vembed",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copytree(ROOT / "configs", "checkout/configs")
    verb = Path("checkout/vembed/cli/run_train.py")
    verb.write_text(
        verb.read_text().replace("would run: ", "would run, says the checkout: ")
    )
    done = process(
        "checkout/vembed/entrypoints/train.py",
        "cfg.yaml",
        "epochs=2",
        "use_fsdp=true",
        "--dry-run",
    )
    assert done.code == 0, done.err
    assert "epochs: 2.0  # command line" in done.out
    assert "would run, says the checkout: " in done.out, (
        "not the vembed that is installed"
    )


def test_the_entry_point_stays_one_process_unless_asked(process: Command) -> None:
    Path("cfg.yaml").write_text("model_name: m\ndata_path: d\n")
    plain = process("-m", "vembed.entrypoints.train", "cfg.yaml", "--dry-run")
    assert "world size: 1 = 1 process(es) (started as one)" in plain.out
    by_accelerate = process(
        "-m",
        "vembed.entrypoints.train",
        "cfg.yaml",
        "--dry-run",
        "--devices",
        "8",
        ACCELERATE_MIXED_PRECISION="no",
    )
    assert "world size: 1 = 1 process(es) (set by the launcher)" in by_accelerate.out
    asked = process(
        "-m",
        "vembed.entrypoints.train",
        "cfg.yaml",
        "--devices",
        "8",
        "--precision",
        "bf16-mixed",
        "--dry-run",
    )
    assert "world size: 8 = 8 process(es) (num_processes)" in asked.out


def test_config_shows_origins_and_is_a_config_itself(vembed: Command, cfg: str) -> None:
    done = vembed("config", cfg, "lr=1e-5", "--loss", "triplet", "temperature=0.1")
    assert done.code == 2
    assert (
        f"error: data_path: train.jsonl does not exist (looked from {Path.cwd()})\n"
        == done.err
    )
    Path("train.jsonl").touch()
    words = ("val_data_path=val.csv", "model_name=./m", "image_root=pictures")
    assert vembed("config", cfg, *words).err.count(" does not exist") == 2
    for verb in ("config", "train"):  # before the data are read, which may take minutes
        assert "also: model_name: ./m is not a folder" in vembed(verb, cfg, *words).err
    Path("val.csv").touch()
    assert (
        "write a list: [train.jsonl, val.csv]"
        in vembed("config", cfg, "data_path=train.jsonl, val.csv").err
    )
    done = vembed("config", cfg, "lr=1e-5", "--loss", "triplet", "temperature=0.1")
    assert done.code == 0
    assert "learning_rate: 1.0e-05  # command line" in done.out
    assert "# translated: lr: 1e-05 -> learning_rate: 1e-05 (command line)" in done.out
    assert "# note: temperature: 0.1 has no effect with loss: triplet" in done.out
    Path("again.yaml").write_text(done.out)
    assert (
        load_config("again.yaml").to_dict()
        == load_config(cfg, ["lr=1e-5", "loss=triplet", "temperature=0.1"]).to_dict()
    )


def test_schema_is_json_for_editors(vembed: Command) -> None:
    done = vembed("schema")
    schema = json.loads(done.out)
    assert list(schema["properties"]) == list(all_options())
    assert schema["required"] == ["model_name", "data_path"]
    assert all("description" in one for one in schema["properties"].values())
    assert vembed("schema", "--format", "markdown").out.startswith("# Options\n")
    assert vembed("schema", "--format", "xml").code == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_init_writes_a_config_that_loads(vembed: Command, family: str) -> None:
    Path("train.jsonl").write_text('{"query": "a", "positive": "b"}\n' * 3)
    done = vembed("init", "--family", family)
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    assert config.data.data_path == "train.jsonl"
    assert config.objective.loss == "infonce"
    assert all(
        "#" in line
        for line in Path("vembed.yaml").read_text().splitlines()
        if line.strip()
    )


def test_init_gives_new_projections_a_rate_of_their_own(vembed: Command) -> None:
    Path("train.jsonl").write_text('{"query": "a", "positive": {"image": "b.png"}}\n')
    assert vembed("init", "--family", "composed").code == 0
    config = load_config("vembed.yaml")
    assert (
        config.optimizer.learning_rate == "auto"
        and config.optimizer.head_learning_rate is None
    ), "1e-3 when the run begins"


def test_export_says_where_the_model_is(vembed: Command) -> None:
    done = vembed("export", str(shared(tiny_bert)), "mine")
    assert done.code == 0, done.err
    assert done.out == "wrote mine\n"
    assert Path("mine/config.json").is_file()


def test_init_does_not_write_over_a_file(vembed: Command) -> None:
    Path("vembed.yaml").write_text("mine")
    done = vembed("init")
    assert done.code == 2 and "vembed.yaml exists already" in done.err
    assert Path("vembed.yaml").read_text() == "mine"
    assert vembed("init", "--force").code == 0
    assert (
        "did you mean 'clip'"
        in vembed("init", "--family", "clipp", "--output", "a.yaml").err
    )
    assert vembed("init", "--output", "a.txt").code == 2


@pytest.mark.parametrize(
    ("name", "content", "loss", "mapping"),
    [
        (
            "a.jsonl",
            '{"query": "a", "positive": "b", "negatives": ["c"]}\n',
            "infonce",
            None,
        ),
        (
            "a.jsonl",
            '{"sentence1": "a", "sentence2": "b", "score": 0.5}\n',
            "cosent",
            None,
        ),
        (
            "a.jsonl",
            '{"search": "a", "context": "b"}\n',
            "infonce",
            {"search": "query", "context": "positive"},
        ),
        ("a.csv", "question,answer\na,b\n", "infonce", None),
        (
            "a.csv",
            "ID;Subject;Resolution\n1;a;b\n",
            "infonce",
            {"Subject": "query", "Resolution": "positive"},
        ),
        (
            "a.jsonl",
            '{"caption": "a", "img": "b.png"}\n',
            "infonce",
            {"caption": "query", "img": "positive_image"},
        ),
        ("a.tsv", "q\tpassage\na\tb\n", "infonce", {"q": "query"}),
        ("a.json", '[{"anchor": "a", "positive": "b"}]', "infonce", None),
    ],
)
def test_init_looks_at_the_data(
    vembed: Command, name: str, content: str, loss: str, mapping: dict[str, str] | None
) -> None:
    Path(name).write_text(content)
    done = vembed("init", "--data", name, "--val-data", name)
    assert done.code == 0, done.err
    config = load_config("vembed.yaml")
    assert (
        config.objective.loss,
        config.data.column_mapping,
        config.data.val_data_path,
    ) == (
        loss,
        mapping,
        name,
    )


def test_init_reads_the_columns_of_parquet(vembed: Command) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"query": ["a"], "positive": ["b"]}), "a.parquet")
    assert vembed("init", "--data", "a.parquet").code == 0
    assert (
        "# Data: 1 records; the first 1 records have query, positive"
        in Path("vembed.yaml").read_text()
    )
    Path("b.parquet").write_bytes(b"nothing")
    refused = vembed("init", "--data", "b.parquet", "--force")
    assert refused.code == 2
    assert "b.parquet cannot be read as Parquet" in refused.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"a": 1}\n', "train.jsonl: "),
        ("nothing\n", "train.jsonl:1"),
        ("[1]\n3", "train.jsonl:1"),
        ("3\n", "train.jsonl:1"),
        ("\n", "train.jsonl"),
    ],
)
def test_init_refuses_data_that_cannot_be_trained_on(
    vembed: Command, content: str, sentence: str
) -> None:
    Path("train.jsonl").write_text(content)
    done = vembed("init")
    assert done.code == 2
    assert sentence in done.err
    assert not Path("vembed.yaml").exists()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("eval m d --dims a,b", "--dims"),
        ("eval m d --task x", "--task"),
        ("encode m i o.npy --kind x", "--kind"),
        ("encode m i o.npy --torch-dtype int8", "torch_dtype"),
        ("encode m i o.npy --layers 1 --pooling x", "--pooling"),
        ("export m --check --format x", "--format"),
        ("mine x.yaml --nproc two", "--nproc"),
    ],
)
def test_wrong_values_name_their_option(
    vembed: Command, words: str, option: str
) -> None:
    done = vembed(*words.split())
    assert done.code == 2 and option in done.err


@pytest.mark.promise("B26")
def test_a_dry_run_refuses_what_the_run_refuses(
    vembed: Command, cfg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    done = vembed("train", cfg, "--dry-run")
    assert done.code == 2
    assert (
        "WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set although RANK=0, LOCAL_RANK=0"
        in done.err
    )
