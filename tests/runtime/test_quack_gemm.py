"""The tile of a large product, against counts by hand: 132 multiprocessors compute 132 tiles in a wave."""

import pytest

from cbatch.runtime.fast.quack_gemm import choose_tile


@pytest.mark.parametrize(
    ("rows", "outputs", "gated", "tile"),
    [
        (1024, 28672, True, (128, 160)),  # 8 x 180 = 1,440 of 1,452 in 11 waves; 128 x 256: 896 of 924 in 7
        (512, 28672, True, (128, 224)),  # 4 x 128 = 512 of 528 in 4 waves; as full with 128 x 128, which is smaller
        (256, 27648, True, (128, 224)),  # 2 x 124 = 248 of 264 in 2 waves
        (
            640,
            28672,
            True,
            (128, 160),
        ),  # 5 x 180 = 900 of 924 in 7 waves; 128 x 224 fills as much, but five do not pair
        (700, 28672, True, None),  # 6 x 150 = 900 of 924 with 128 x 192, but of the last row of tiles half is empty
        (1024, 6144, False, (256, 192)),  # 4 x 32 = 128 in one wave
        (256, 15360, False, (128, 240)),  # 2 x 64 = 128 in one wave
        (2048, 28672, True, (128, 160)),  # 16 x 180 = 2,880 of 2,904 in 22 waves
        (4096, 28672, True, None),  # any tile fills the multiprocessors
        (1024, 4096, False, None),  # 8 x 18 = 144 with 128 x 240: a second wave for 12 tiles
    ],
)
def test_tile(rows: int, outputs: int, gated: bool, tile: tuple[int, int] | None) -> None:
    chosen = choose_tile(rows, outputs, 132, gated=gated)
    assert (chosen and chosen[:2]) == tile
