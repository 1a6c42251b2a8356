"""The native kernels against torch, for every row count around their tile sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from serving.models.native import NativeKernels, load_native

ROWS = [*range(1, 15), 17, 32]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    found = load_native()
    assert found is not None, "the test machine has no C++ compiler (g++)"
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(kernels: NativeKernels, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96), torch.randn(53, 96).to(dtype), torch.randn(53)
    inputs = x.to(dtype).float() if kernels.rounds_inputs else x
    expected, panels = F.linear(inputs, weight.float(), bias), kernels.pack(weight)
    torch.testing.assert_close(kernels.linear(x, panels, bias, torch.empty(rows, 53)), expected, atol=1e-4, rtol=1e-4)
    before = torch.randn(rows, 53)
    added = kernels.linear(x, panels, None, before.clone(), add=True)
    torch.testing.assert_close(added, before + F.linear(inputs, weight.float()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_block(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = torch.randn(32, 96), kernels.pack(torch.randn(53, 96).to(dtype))
    alone = torch.cat([kernels.linear(x[i : i + 1].contiguous(), weight, None, torch.empty(1, 53)) for i in range(32)])
    for rows in ROWS:
        block = kernels.linear(x[:rows].contiguous(), weight, None, torch.empty(rows, 53))
        assert torch.equal(block, alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 96])
def test_bytes_are_the_nearest_multiples_of_their_row_s_scale(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(13, width), (torch.randn(53, width) * torch.rand(53, 1)).to(dtype)
    weight[5] = 0.0
    panels = kernels.pack_bytes(weight)
    scales = weight.float().abs().amax(dim=1) / 127
    assert panels.scales is not None
    torch.testing.assert_close(panels.scales, scales)
    near = (weight.float() / scales.clamp(min=1e-30)[:, None]).round() * scales[:, None]
    assert (near - weight.float()).abs().max() <= scales.max() * 0.501
    out = kernels.linear(x, panels, None, torch.empty(13, 53))
    torch.testing.assert_close(out, x @ near.T, atol=1e-4, rtol=1e-4)
    alone = torch.cat([kernels.linear(x[i : i + 1].contiguous(), panels, None, torch.empty(1, 53)) for i in range(13)])
    assert torch.equal(out, alone)


def test_pairs_of_inputs_are_whole(kernels: NativeKernels) -> None:
    odd = torch.randn(5, 7).bfloat16()
    if kernels.rounds_inputs:
        with pytest.raises(ValueError, match="even number of inputs, got 7"):
            kernels.pack(odd)
    else:
        assert torch.equal(kernels.embed(kernels.pack(odd), torch.arange(5)), odd.float())


def test_rms_norm_and_swiglu(kernels: NativeKernels) -> None:
    x, weight = torch.randn(5, 64) * 10, torch.randn(64)
    normed = kernels.rms_norm(x, weight, torch.empty(5, 64), epsilon=1e-5)
    torch.testing.assert_close(normed, F.rms_norm(x, (64,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    gate, up = torch.linspace(-200, 200, 320).reshape(5, 64), torch.randn(5, 64)
    inner = kernels.swiglu(torch.cat([gate, up], dim=1), torch.empty(5, 64))
    torch.testing.assert_close(inner, F.silu(gate) * up, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_reads_packed_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    table = torch.randn(53, 40).to(dtype)
    ids = torch.tensor([0, 7, 8, 15, 16, 31, 52])
    assert torch.equal(kernels.embed(kernels.pack(table), ids), table[ids].float())


@pytest.mark.parametrize("with_logsumexp", [False, True])
@pytest.mark.parametrize("width", [1, 7, 8, 64, 255, 256, 1003])
def test_columns_are_what_torch_reads(kernels: NativeKernels, width: int, with_logsumexp: bool) -> None:
    rows = torch.randint(-3, 3, (33, width)).float()
    rows[0] = float("-inf")
    padded = torch.cat([rows, torch.full((33, 5), 9.0)], dim=1)[:, :width]  # a view: what lies behind is not seen
    rng = np.random.default_rng(width)
    drawn, draft = rng.integers(-1, width, 33), rng.integers(0, width, 33)
    columns, numbers = kernels.columns(padded, drawn, draft, with_logsumexp=with_logsumexp)
    top, values = rows.argmax(dim=-1).numpy(), rows.numpy()  # the first of equals
    emitted = np.where(drawn < 0, top, drawn)
    assert columns.tolist() == np.stack([top, emitted], axis=1).tolist()
    for index, where in enumerate((top, emitted, draft)):
        np.testing.assert_array_equal(numbers[:, index], values[np.arange(33), where])
    if with_logsumexp:
        np.testing.assert_allclose(numbers[:, 3], rows.logsumexp(dim=-1).numpy(), atol=1e-5, rtol=1e-5)
    else:
        assert np.isnan(numbers[:, 3]).all()


def test_columns_of_no_number(kernels: NativeKernels) -> None:
    rows = torch.full((2, 300), float("nan"))
    rows[1, 299] = 1.0
    columns, _ = kernels.columns(rows, np.full(2, -1), np.zeros(2, dtype=np.int64), with_logsumexp=False)
    assert columns.tolist() == [[0, 0], [299, 299]]


def test_log_sum_exp(kernels: NativeKernels) -> None:
    rows = torch.randn(5, 1003)
    rows[0] = float("-inf")
    torch.testing.assert_close(kernels.log_sum_exp(rows[1:]), rows[1:].logsumexp(dim=-1), atol=1e-5, rtol=1e-5)
    assert kernels.log_sum_exp(rows[:1]).item() == float("-inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7])
def test_attend(kernels: NativeKernels, dtype: torch.dtype, window: int, head_dim: int, group: int) -> None:
    torch.manual_seed(0)
    queries, heads, capacity, rows = 2 * group, 2, 40, 7
    keys, values = (torch.randn(2, heads, capacity, head_dim).to(dtype) for _ in range(2))
    qkv = torch.randn(rows, (queries + 2 * heads) * head_dim)
    positions = torch.tensor([0, 3, 7, 8, 20, 39, 39])
    places = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    out = kernels.attend(
        qkv, (keys, values), (places, positions), torch.empty(rows, queries * head_dim),
        num_queries=queries, scale=0.3, window=window,
    )  # fmt: skip
    for row in range(rows):
        last = int(positions[row])
        first = max(0, last - window + 1) if window else 0
        k, v = (
            part[places[row], :, first : last + 1].float().repeat_interleave(queries // heads, 0)
            for part in (keys, values)
        )
        q = qkv[row, : queries * head_dim].reshape(queries, head_dim)
        scores = torch.einsum("qd,qnd->qn", q, k) * 0.3
        expected = torch.einsum("qn,qnd->qd", scores.softmax(dim=-1), v).flatten()
        torch.testing.assert_close(out[row], expected, atol=1e-4, rtol=1e-4)


def test_loops_of_changing_size_run_every_block_once(kernels: NativeKernels) -> None:
    """Short loops in close succession: a worker that is late for one must not touch the next."""
    small, large = kernels.pack(torch.eye(32)), kernels.pack(torch.eye(512))
    x, y = torch.ones(1, 32), torch.ones(1, 512)
    for _ in range(4000):
        assert kernels.linear(x, small, None, torch.ones(1, 32), add=True).sum() == 64
        assert kernels.linear(y, large, None, torch.ones(1, 512), add=True).sum() == 1024
