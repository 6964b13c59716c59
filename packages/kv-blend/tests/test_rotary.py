"""A moved key is the key that would have been rotated for the new position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_blend.rotations import UNROTATED, Pairing, Rotation

HEADS, DIM = 3, 16


def rotated(keys: torch.Tensor, positions: torch.Tensor, pairing: str, frequencies: torch.Tensor) -> torch.Tensor:
    """The definition, as complex numbers of 128 bits."""
    planes = 2 * frequencies.numel()
    part = keys[..., :planes].double()
    first, second = part.chunk(2, -1) if pairing == "halves" else (part[..., ::2], part[..., 1::2])
    turned = torch.complex(first, second) * torch.exp(1j * positions.double()[:, None, None] * frequencies.double())
    if pairing == "halves":
        joined = torch.cat((turned.real, turned.imag), -1)
    else:
        joined = torch.stack((turned.real, turned.imag), -1).flatten(-2)
    return torch.cat((joined, keys[..., planes:].double()), -1)


@pytest.mark.slow
@given(
    pairing=st.sampled_from(["halves", "neighbours"]),
    planes=st.integers(1, DIM // 2),
    begin=st.sampled_from([0, 5]),
    position=st.integers(0, 200_000),
    distance=st.integers(-200_000, 200_000),
    seed=st.integers(0, 1000),
)
def test_moving_is_rotating_for_the_new_position(
    pairing: Pairing, planes: int, begin: int, position: int, distance: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, HEADS, DIM, generator=draw)
    frequencies = 10000.0 ** -(torch.arange(planes) / planes)
    positions = position + torch.arange(5)
    here = rotated(keys, positions, pairing, frequencies).float()
    there = rotated(keys, positions + distance, pairing, frequencies)
    unrotated = torch.randn(5, HEADS, begin, generator=draw)
    moved = Rotation(pairing, frequencies).moved(torch.cat((unrotated, here), -1), distance, begin)
    assert moved.dtype == torch.float32
    assert torch.equal(moved[..., :begin], unrotated)
    torch.testing.assert_close(moved[..., begin:].double(), there, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_a_rounded_key_is_rounded_once_more(dtype: torch.dtype, error: float) -> None:
    keys = torch.randn(100, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    frequencies = 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
    positions = torch.arange(100)
    here = rotated(keys, positions, "halves", frequencies).to(dtype)
    moved = Rotation("halves", frequencies).moved(here, 1234)
    there = rotated(keys, positions + 1234, "halves", frequencies)
    assert moved.dtype == dtype
    assert (moved.double() - there).norm() < error * there.norm()


def test_keys_without_positions_stay() -> None:
    keys = torch.randn(5, HEADS, DIM)
    assert UNROTATED.moved(keys, 7) is keys
