import gc

import torch

from serving.models.big_pages import BigPages


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def test_tensors_of_one_chunk_do_not_overlap_and_begin_at_cache_lines():
    pages = BigPages()
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.float32), ((2, 0), torch.float32)]
    tensors = [pages.empty(shape, dtype) for shape, dtype in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    assert [tuple(tensor.shape) for tensor in tensors] == [shape for shape, _ in shapes]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors[:2])


def test_a_tensor_larger_than_a_chunk_fits_and_small_ones_follow():
    pages = BigPages()
    pages.empty((8,), torch.float32)
    large = pages.empty((9 << 20,), torch.float32)
    large[-1] = 1.0
    assert pages.empty((8,), torch.float32).fill_(2.0).sum() == 16.0
    assert large[-1] == 1.0


def test_memory_is_taken_when_touched_and_given_back_with_the_last_tensor():
    before = resident_bytes()
    pages = BigPages()
    tensor = pages.empty((64 << 20,), torch.uint8)
    assert resident_bytes() - before < 16 << 20
    tensor.fill_(1)
    assert resident_bytes() - before > 48 << 20
    del tensor, pages
    gc.collect()
    assert resident_bytes() - before < 16 << 20
