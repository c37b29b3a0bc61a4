"""The share of matrix products in a step."""

from benchmarks.products import profiled_step, shares
from vembed.training.optimizer import Update
from vembed.training.step import TrainingStep


def test_products_are_told_from_the_rest():
    actual = {"mm": 1.5, "addmm": 1.0, "bmm": 0.5, "gelu": 0.25, "copy_": 0.75}
    assert shares(actual) == (
        "products 3.00 s, the rest 1.00 s (25%, with the profiler's own time); "
        "most of the rest: copy_ 0.750, gelu 0.250"
    )


def test_the_training_is_left_as_it_was():
    before = TrainingStep.accumulate, Update.apply
    with profiled_step(0):
        assert before != (TrainingStep.accumulate, Update.apply)
    assert before == (TrainingStep.accumulate, Update.apply)
