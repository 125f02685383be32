"""Vision configuration: the architecture of a vision tower as values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TowerActivation(Enum):
    """Function of an MLP, or of the gate of one."""

    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    QUICK_GELU = "quick_gelu"
    SILU = "silu"


class NormKind(Enum):
    LAYER = "layer norm"
    RMS = "RMS norm"
    OFFSET_RMS = "RMS norm whose weight is stored without its 1"
    WIDE_RMS = "RMS norm that is rounded after its weight"


class Positions(Enum):
    """Learned positions that are added to the patches. Most form a square grid."""

    NONE = "none"
    FIXED = "fixed"  # one for each patch of a picture, which has one size
    BUCKETS = "buckets"  # the picture is stretched over the grid; a patch takes the one it is in
    INTERPOLATED = "interpolated"  # bilinear, from corner to corner
    AXES = "axes"  # the sum of those of a patch's column and row


class Merge(Enum):
    """Makes a token of a square of patches."""

    JOIN = "join"  # their features one after the other, row by row
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class PixelScaling:
    """Turns pixels from 0 to 255 into numbers: times a factor, minus a mean, by a deviation."""

    factor: float
    mean: tuple[float, ...]  # of each channel
    deviation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProjectorConfig:
    """Turns patches into tokens of the decoder: a norm, the merge, and linear layers.

    The activation precedes the last of several linear layers.
    """

    norm: NormKind | None
    norm_epsilon: float
    norms_merged: bool  # the norm follows the merge
    sizes: tuple[int, ...]  # of the outputs of the linear layers
    has_bias: bool
    activation: TowerActivation


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Architecture of a vision tower, independent of its model family."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    patch_size: int  # pixels along a side
    merge_size: int  # patches along a side of the square that is a token
    picture_size: int | None  # pixels along each side of all pictures; None: any
    scaling: PixelScaling
    positions: Positions
    position_side: int  # of the grid of learned positions; of the axes
    rope_theta: float | None  # of RoPE over rows and columns; None: no RoPE
    is_rope_alternating: bool  # columns have frequencies between those of rows
    norm: NormKind
    norm_epsilon: float
    is_clipped: bool  # inputs and outputs of the linear layers in attention and MLPs have bounds
    activation: TowerActivation
    is_gated: bool
    merge: Merge
    token_scale: float  # of merged tokens
    is_standardized: bool  # tokens have a bias and a scale by feature then
    projector: ProjectorConfig
    window_size: int | None  # tokens along a side of the window that patches attend to
    full_layers: frozenset[int]  # whose patches attend to the whole picture in spite of windows
    # DeepStack: the layers whose outputs are projected, too, by `level_projector`. The results
    # follow the token in an encoding, and are added to the outputs of the first decoder layers.
    level_layers: tuple[int, ...]
    level_projector: ProjectorConfig | None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Return the features of a token before its projection."""
        squares = self.merge_size**2 if self.merge is Merge.JOIN else 1
        return self.hidden_size * squares

    @property
    def token_size(self) -> int:
        """Return the size of what is taken in place of an embedding."""
        return self.projector.sizes[-1]

    @property
    def encoding_size(self) -> int:
        """Return the columns of an encoding: a token's, and those of its levels."""
        return self.token_size * (1 + len(self.level_layers))

    @property
    def pixels_per_token(self) -> int:
        """Return the pixels along a side. Both sides of what is seen are multiples of it."""
        return self.patch_size * self.merge_size

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a picture.

        Raises ValueError for pixels that the tower cannot encode.
        """
        side, patch = self.pixels_per_token, self.patch_size
        if self.positions is Positions.BUCKETS:  # pixels beyond whole patches are not seen
            height, width = height // patch * patch, width // patch * patch
        if height % side or width % side or not height or not width:
            raise ValueError(f"a picture of {width}x{height} pixels: multiples of {side} are due")
        if self.picture_size not in (None, height) or self.picture_size not in (None, width):
            size = self.picture_size
            raise ValueError(f"a picture of {width}x{height} pixels instead of {size}x{size}")
        if self.positions is Positions.AXES and max(height, width) > self.position_side * patch:
            longest = self.position_side * patch
            raise ValueError(
                f"a picture of {width}x{height} pixels: at most {longest} along a side"
            )
        return height // side, width // side

    def num_tokens(self, height: int, width: int) -> int:
        """Return the rows of a picture's encoding."""
        rows, columns = self.token_grid(height, width)
        return rows * columns
