"""Which of the paced weights' words each layer has, and each rank holds. Pure.

A word is `WORD_BYTES` long; words are counted through the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.model.degrees import Degrees
from harness.model.shape import ModelShape
from harness.model.training.axes import Place
from harness.model.training.schedule import stages

WORD_BYTES = 8


def layer_words(shape: ModelShape, bytes_scale: float) -> list[range]:
    """Return each layer's place among the words of all weights; embeddings are shared out too."""
    words = max(shape.layers, round(shape.parameter_bytes * bytes_scale) // WORD_BYTES)
    bounds = [words * layer // shape.layers for layer in range(shape.layers + 1)]
    return [range(bounds[layer], bounds[layer + 1]) for layer in range(shape.layers)]


def shard_of(place: Place, degrees: Degrees, layers: Sequence[range]) -> list[range]:
    """Return which words a rank holds: of each layer of its stage, its part over TP and DP."""
    parts, mine = degrees.tp * degrees.dp, place.tp * degrees.dp + place.dp
    own = stages(len(layers), degrees.pp)[place.pp]
    return [
        range(
            layers[n].start + len(layers[n]) * mine // parts,
            layers[n].start + len(layers[n]) * (mine + 1) // parts,
        )
        for n in own
    ]


def weights_bytes(layers: Sequence[range]) -> int:
    """Return the size of all of them: a published file's, less its header."""
    return layers[-1].stop * WORD_BYTES
