"""Models from whole configs, as commands and the trainer make them."""

from vembed.models.building import build_model
from vembed.models.families.description import describe


def described(config, *, for_inference=False):
    """Return the description of a config's model."""
    return describe(
        config.model,
        config.matryoshka,
        similarity=config.objective.similarity,
        use_qlora=config.adapters.use_qlora,
        for_inference=for_inference,
    )


def model_of(config, description=None, **options):
    """Return a config's model."""
    return build_model(
        description or described(config),
        config.model,
        config.adapters,
        objective=config.objective,
        seed=config.run.seed,
        **options,
    )
