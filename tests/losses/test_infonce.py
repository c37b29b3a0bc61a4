"""InfoNCE and the sigmoid loss against the reference, over options, sizes, duplicates and tilings."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.losses.batches import check, config_of, make_batch, tiled
from vembed.losses.build import build_loss


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=st.fixed_dictionaries(
        {
            "loss": st.sampled_from(["infonce", "infonce", "sigmoid"]),
            "bidirectional": st.booleans(),
            "same_side_negatives": st.sampled_from(
                ["none", "queries", "documents", "both"]
            ),
            "learn_temperature": st.booleans(),
            "false_negative_margin": st.sampled_from([None, 0.0, 0.2, -0.3]),
            "hard_negatives_scope": st.sampled_from(["all", "own"]),
            "similarity": st.sampled_from(["cosine", "dot"]),
            "temperature": st.sampled_from([0.05, 0.5]),
        }
    ),
    mrl_dims=st.none() | st.lists(st.integers(1, 6), min_size=1, max_size=3),
    sizes=st.fixed_dictionaries(
        {
            "num_examples": st.integers(1, 7),
            "max_positives": st.integers(1, 3),
            "max_negatives": st.integers(0, 3),
            "num_contents": st.sampled_from([1, 2, 5, None]),
            "seed": st.integers(0, 1000),
        }
    ),
    tiling=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_any_combination_equals_the_reference(options, mrl_dims, sizes, tiling):
    if mrl_dims:
        weights = [1.0 + 0.5 * number for number in range(len(mrl_dims))]
        options |= {"mrl_dims": mrl_dims, "mrl_weights": weights}
    batch = make_batch(dim=6, **sizes)
    config = config_of(**options)
    with tiled(*tiling):
        check(batch, config, build_loss(config))
