"""vembed tune: the first trial is the config itself, a stopped search goes on, processes share it, the best is YAML."""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.commands import command, invoke, start
from tests.tiny import read_json
from tests.training.test_run import config_file
from vembed.config.loading import load_config, save_config
from vembed.config.schema import TrainConfig
from vembed.errors import RunError, UserError
from vembed.pipelines import option_search as searching
from vembed.pipelines.option_search import Search, ranges, run_tune


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    options = {"batch_size": 8, "epochs": 1, "max_steps": None}
    return str(config_file(folder, **options, learning_rate="auto"))


@pytest.fixture
def folder(tmp_path):
    """Of the search."""
    return tmp_path / "tune"


def refuses(message, *search, error=UserError):
    with pytest.raises(error, match=message):
        run_tune(Search(*search))


def trials_of(folder):
    return read_json(folder / "trials.json")


def test_a_search_that_fails_in_the_middle_goes_on(config, folder, monkeypatch, capsys):
    search = Search(config, (), folder, 4)
    original = searching._run

    def killed(search, number, *arguments):
        if number == 2:
            raise KeyboardInterrupt
        return original(search, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(searching, "_run", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tune(search)
    run_tune(search)
    said = capsys.readouterr().out
    assert "trial 0: the config as it is" in said and "2 trials are done" in said
    trials = trials_of(folder)
    assert len(trials) == 4 and trials[0]["trial"] == 0
    best = load_config(folder / "best.yaml")
    complete = [trial for trial in trials if trial["state"] == "complete"]
    top = max(complete, key=lambda trial: trial["score"])
    assert f"best: trial {top['trial']}, {top['score']:.4f}" in said
    if top["trial"]:
        rate = top["options"]["learning_rate"]
        assert best.optimizer.learning_rate == pytest.approx(rate, rel=0.01)
    # The search's folders are its own.
    assert best.run.output_dir == load_config(config).run.output_dir
    run_tune(search)  # nothing is left to do
    assert trials_of(folder) == trials
    refuses("choose another --output", config, ("seed=3",), folder, 4)


def test_a_search_that_goes_on_tries_nothing_twice(
    config, folder, tmp_path, monkeypatch
):
    overrides = ("learning_rate=1e-4",)
    save_config(load_config(config, overrides), tmp_path / "config.yaml")
    monkeypatch.setattr(searching, "_run", lambda *arguments: ([0.5], tmp_path))
    for trials in (2, 3, 4):  # each start draws its first guesses at random
        run_tune(Search(config, overrides, folder, trials, ("learning_rate",)))
    tried = {trial["options"]["learning_rate"] for trial in trials_of(folder)}
    assert len(tried) == 4


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_an_interrupted_search_says_how_it_goes_on(
    config, folder, tmp_path, monkeypatch, nproc
):
    errors = tmp_path / "stderr"
    words = ("epochs=1000", "learning_rate=1e-4")
    save_config(load_config(config, words), tmp_path / "config.yaml")
    # The learning rate is that of the first trial, and is searched as well.
    with monkeypatch.context() as patch:  # trial 0
        patch.setattr(searching, "_run", lambda *arguments: ([0.5], tmp_path))
        run_tune(Search(config, words, folder, 1))
    flags = ["--trials", "3", "--output", str(folder), "--nproc", nproc]
    search = start("tune", config, *words, *flags, stderr=errors)

    def is_training(trial):
        metrics = folder / f"trial-{trial}" / "metrics.jsonl"
        return metrics.is_file() and "loss" in metrics.read_text()

    end = time.monotonic() + 60
    while not (is_training(1) and is_training(int(nproc))):
        assert search.poll() is None and time.monotonic() < end, errors.read_text()
        time.sleep(0.05)
    search.send_signal(signal.SIGTERM)
    assert search.wait(60) == 143
    where = "in trial 1" if nproc == "1" else "with 2 trials at once"
    last = errors.read_text().splitlines()[-1]
    assert f"SIGTERM: stopped {where}; the same command" in last
    assert not list(folder.glob("trial-*/checkpoint-*")), "nothing would read them"


def test_a_trial_whose_time_is_up_has_its_score(config, folder, tmp_path):
    """The limit is on each training, not on the search."""
    words = ("epochs=1000", "max_train_minutes=0.03", "eval_steps=5")
    run_tune(Search(config, words, folder, 2, ("temperature",)))
    assert len(trials_of(folder)) == 2
    rare = (*words[:2], "eval_steps=100000")
    message = "the time was up before the first evaluation"
    refuses(message, config, rare, tmp_path / "other", 2, error=RunError)


def test_two_processes_share_the_trials(config, folder):
    flags = "--trials 4 --options learning_rate,temperature --nproc 2 --output"
    # Guards need checkpoints, and a trial has none.
    guards = f"guards=[{load_config(config).data.val_data_path}]"
    words = (config, guards, "eval_steps=2", "save_steps=2")
    command("tune", *words, *flags.split(), str(folder), code=0)
    options = [trial["options"] for trial in trials_of(folder)]
    for values in options:
        assert values.keys() == {"learning_rate", "temperature"}
    assert len({values["learning_rate"] for values in options}) == len(options) == 4


def test_a_dry_run_shows_ranges_and_writes_nothing(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tune", config, "use_lora=true", "--trials", "9", "--dry-run"]
    done = invoke(*words)
    assert "trials: 9, the first one the config as it is" in done.output
    for name in ("learning_rate", "temperature", "batch_size", "lora_r"):
        assert f"  {name}: " in done.output
    assert "  learning_rate: an eighth to 8 times that of the first" in done.output
    done = invoke(*words, "learning_rate=0.02")
    assert "  learning_rate: 0.0025 to 0.16, by ratio (first 0.02)" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "options", "sentence"),
    [
        (("val_data_path=null",), (), "the config has none: give val_data_path"),
        ((), ("size",), "--options size: it can search learning_rate"),
        ((), ("lora_r",), "has no effect on this run"),
    ],
)
def test_mistakes_are_said_before_the_first_trial(
    config, folder, overrides, options, sentence
):
    refuses(sentence, config, overrides, folder, 3, options)
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_and_a_missing_optuna_are_named(
    config, monkeypatch
):
    refuses(r"--output .* is a file", config, (), Path(config), 3)
    monkeypatch.setitem(sys.modules, "optuna", None)
    refuses(r"pip install 'vembed\[search\]'", config, (), Path(config), 3)


def ranges_with(**options):
    base = {"model_name": "m", "data_path": "d", "learning_rate": 1e-4}
    return {entry.option: entry for entry in ranges(TrainConfig(**base, **options))}


def test_only_what_has_an_effect_is_searched():
    assert "temperature" not in ranges_with(loss="cosine")
    assert "batch_size" not in ranges_with(global_batch_size=64)
    start = ranges_with(loss="cosent")["temperature"].start
    assert start == 0.1, "what the first trial has"
    rate = ranges_with()["learning_rate"]
    assert rate.low < rate.start == 1e-4 < rate.high


@pytest.mark.parametrize("start", [0.001, 3.0])
def test_the_range_of_the_temperature_holds_that_of_the_first_trial(start):
    temperature = ranges_with(temperature=start)["temperature"]
    assert temperature.low <= start <= temperature.high
    assert temperature.low < temperature.high
