"""Runs a yield predictor in the loop: compiled code where there is a compiler, else numpy. Both predict the same.

A prediction is to take less than a hundredth of a round. After a pass over the target's weights nothing that it needs
is in the processor's cache, and numpy's calls then cost several times what they do in a row (0.1 ms, compiled 0.04).
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import numpy as np

from serving.compiling import load_library
from serving.drafters.chooser import Predictor
from serving.drafters.yield_features import FEATURES, feature_rows
from serving.drafters.yield_predictor import YieldPredictor

_SOURCE = Path(__file__).with_name("kernels") / "yields.cpp"
_ROW = Struct(f"{len(FEATURES)}f")


class _Network(ctypes.Structure):
    """The struct Network of yields.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w1", "b1", "w2", "b2", "w3", "b3")),
        *((name, ctypes.c_int64) for name in ("num_features", "num_first", "num_second")),
    )


class ArrayYields:
    """By numpy: what defines the result, and what runs without a compiler."""

    def __init__(self, predictor: YieldPredictor) -> None:
        self._predictor = predictor

    def predict(self, rows: Sequence[Sequence[float]]) -> list[float]:
        predicted: list[float] = self._predictor.predict(feature_rows(rows)).tolist()
        return predicted


class NativeYields:
    """By yields.cpp, on the same weights. Not thread-safe: hidden layers and results have buffers of its own."""

    def __init__(self, predictor: YieldPredictor, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self._run = library.dh_yields
        self._run.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int64, pointer, pointer]
        self._run.restype = None
        self._arrays = (*predictor.first_layer, predictor.w2, predictor.b2, predictor.w3, predictor.b3)
        sizes = (*predictor.w1.shape, len(predictor.w2[0]))
        self._network = _Network(*(array.ctypes.data for array in self._arrays), *sizes)
        self._hidden = np.zeros(sum(sizes[1:]), dtype=np.float32)
        self._addresses = ctypes.addressof(self._network), self._hidden.ctypes.data
        self._make_room(1)

    def predict(self, rows: Sequence[Sequence[float]]) -> list[float]:
        count = len(rows)
        if count > len(self._yields):
            self._make_room(count)
        network, hidden = self._addresses
        self._run(network, b"".join([_ROW.pack(*row) for row in rows]), count, hidden, self._yields_address)
        return self._yields[:count]

    def _make_room(self, count: int) -> None:
        self._yields = (ctypes.c_float * count)()
        self._yields_address = ctypes.addressof(self._yields)


def best_yields(predictor: YieldPredictor) -> Predictor:
    """Compiled code if there is a compiler."""
    library = load_library(_SOURCE, otherwise="predicting yields takes a tenth of a millisecond")
    return ArrayYields(predictor) if library is None else NativeYields(predictor, library)
