"""Runs a yield predictor in the loop: compiled code where there is a compiler, else numpy. Both predict the same.

A prediction is to take less than a hundredth of a round. After a pass over the target's weights nothing that it needs
is in the processor's cache: numpy's calls, and the features put together in Python, then cost several times what they
do in a row.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from math import isnan
from pathlib import Path

import numpy as np

from serving.compiling import load_library
from serving.drafters.chooser import Choice, Predictor
from serving.drafters.token_kinds import TokenKinds
from serving.drafters.yield_features import feature_rows, features, packed_place
from serving.drafters.yield_predictor import YieldPredictor
from serving.memory.lookup import JudgeFields

_SOURCE = Path(__file__).with_name("kernels") / "yields.cpp"


class _Network(ctypes.Structure):
    """The struct Network of yields.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w1", "b1", "w2", "b2", "w3", "b3")),
        *((name, ctypes.c_int64) for name in ("num_features", "num_first", "num_second")),
    )


class _Kinds(ctypes.Structure):
    """The struct Kinds of yields.cpp."""

    _fields_ = (("flags", ctypes.c_void_p), ("last", ctypes.c_int64))


class ArrayYields:
    """By numpy: what defines the result, and what runs without a compiler."""

    def __init__(self, predictor: YieldPredictor, kinds: TokenKinds) -> None:
        self._predictor = predictor
        self._kinds = kinds

    def predict(self, choices: Sequence[Choice]) -> list[float]:
        rows = [features(one.match, one.position, one.history, self._kinds) for one in choices]
        predicted: list[float] = self._predictor.predict(feature_rows(rows)).tolist()
        return predicted


class NativeYields:
    """By yields.cpp, on the same weights. Not thread-safe: layers and results have buffers of its own."""

    def __init__(self, predictor: YieldPredictor, kinds: TokenKinds, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self._run = library.dh_yields
        self._run.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_int64, pointer, pointer]
        self._run.restype = None
        layers = (*predictor.first_layer, predictor.second_weights, predictor.b2, predictor.w3, predictor.b3)
        sizes = (*predictor.w1.shape, len(predictor.w2[0]))
        self._room = np.zeros(sum(sizes), dtype=np.float32)
        self._network = _Network(*(array.ctypes.data for array in layers), *sizes)
        self._kinds = _Kinds(kinds.ctypes.data, len(kinds) - 1)
        self._owners = (layers, kinds)  # of what the structs point to
        self._addresses = ctypes.addressof(self._network), ctypes.addressof(self._kinds), self._room.ctypes.data
        self._make_room(1)

    @cached_property
    def judge(self) -> JudgeFields:
        """The same within a look-up, which then predicts by itself."""
        network, kinds, room = self._addresses
        first = self._owners[0][0]
        run = ctypes.cast(self._run, ctypes.c_void_p)
        judge = JudgeFields(run, network, kinds, room, first.ctypes.data, first.nbytes)
        judge.owner = self
        return judge

    def predict(self, choices: Sequence[Choice]) -> list[float]:
        said = [one.match.predicted for one in choices]
        if not any(map(isnan, said)):
            return said
        count = len(choices)
        if count > len(self._yields):
            self._make_room(count)
        network, kinds, room = self._addresses
        self._run(network, kinds, b"".join(map(_packed, choices)), count, room, self._yields_address)
        return self._yields[:count]

    def _make_room(self, count: int) -> None:
        self._yields = (ctypes.c_float * count)()
        self._yields_address = ctypes.addressof(self._yields)


def best_yields(predictor: YieldPredictor, kinds: TokenKinds) -> Predictor:
    """Compiled code if there is a compiler."""
    library = load_library(_SOURCE, otherwise="predicting yields takes a tenth of a millisecond")
    return ArrayYields(predictor, kinds) if library is None else NativeYields(predictor, kinds, library)


def _packed(choice: Choice) -> bytes:
    return choice.match.packed + packed_place(choice.position, choice.history)
