"""Where the own classes of these tests stand, as a config names them."""

from tests.docs.pages import ROOT

FOLDER = ROOT / "tests" / "own"
BAG = f"{FOLDER}/bag.py:Bag"
PACKED = f"{FOLDER}/packed.py:PackedBag"
BOTH = f"{FOLDER}/both.py:Both"
CONVOLUTIONS = f"{FOLDER}/conv.py:Convolutions"
FREE = f"{ROOT}/examples/own_model/free_transformer/model.py:FreeTransformer"
FREE_SIZES = {
    "vocab_size": 400,
    "hidden_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "latent_dim": 8,
}
