"""All optimizers. A new one is one more file, and one more entry here."""

from __future__ import annotations

from vembed.training.optimizers.adafactor import Adafactor
from vembed.training.optimizers.adamw import AdamW
from vembed.training.optimizers.adamw_8bit import AdamW8Bit, PagedAdamW8Bit
from vembed.training.optimizers.declaration import OptimizerKind
from vembed.training.optimizers.sgd import Sgd

_KINDS: tuple[OptimizerKind, ...] = (
    AdamW(),
    AdamW8Bit(),
    PagedAdamW8Bit(),
    Adafactor(),
    Sgd(),
)
OPTIMIZERS: dict[str, OptimizerKind] = {kind.name: kind for kind in _KINDS}
