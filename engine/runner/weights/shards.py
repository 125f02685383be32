"""Shard of a decoder's weights: the heads of attention and the part of each MLP of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_digests import FileIdentity
from baton.core.errors import InvalidConfig
from baton.engine.runner.model.config import ModelConfig, QkNorm
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.weights.tensor_names import TensorMap, check_tensors


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the model as a rank computes it. Raises InvalidConfig if it cannot be divided."""
    kinds = config.moe, config.latent, config.recurrent, config.quantization
    norms = {layer.qk_norm for layer in config.layers}
    sizes = config.num_heads, config.num_kv_heads, *(layer.mlp_size for layer in config.layers)
    has_own = config.per_layer is not None or any(layer.kv_heads for layer in config.layers)
    if any(kinds) or has_own or config.has_output_gate or QkNorm.ALL_HEADS in norms:
        raise InvalidConfig(f"{config.architecture}: its layers cannot be divided among ranks")
    if any(size % shard.size for size in sizes):
        raise InvalidConfig(
            f"{config.num_heads} heads, {config.num_kv_heads} KV heads and MLPs of "
            f"{sizes[2]} numbers cannot be divided by {shard.size} ranks"
        )
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        layers=tuple(
            replace(layer, mlp_size=layer.mlp_size // shard.size) for layer in config.layers
        ),
    )


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """Implements `Tensors` of one rank: where its tensor is shorter, the part of the whole one."""

    whole: Tensors
    own_shapes: Mapping[str, Shape]
    shard: Shard

    @classmethod
    def of(cls, config: ModelConfig, whole: Tensors, shard: Shard) -> ShardedTensors:
        """Check and divide the tensors of a model. Raises InvalidConfig if that is not possible."""
        check_tensors(config, whole)
        own = TensorMap(shard_config(config, shard), whole.shapes())
        if min(len(own.names.qkv), len(own.names.gate_up)) == 1:
            raise InvalidConfig(f"{config.architecture}: its stacked matrices cannot be divided")
        return cls(whole, own.shapes(), shard)

    def names(self) -> list[str]:
        return self.whole.names()

    def shapes(self) -> dict[str, Shape]:
        return {name: self.own_shapes.get(name, own) for name, own in self.whole.shapes().items()}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        """Do nothing: the whole tensors are checked."""

    def tensor(self, name: str) -> Tensor:
        tensor = self.whole.tensor(name)
        for axis, size in enumerate(self.own_shapes.get(name, ())):
            if size != tensor.shape[axis]:
                tensor = tensor.narrow(axis, self.shard.rank * size, size)
        return tensor

    def part(self, name: str, index: int) -> Tensor:
        return self.tensor(name)[index]

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def quantized(self, name: str, index: int | None = None) -> None:
        if self.whole.quantized(name, index) is not None:
            raise InvalidConfig(f"{name} is quantized in its file: it cannot be divided")

    def identities(self) -> Sequence[FileIdentity]:
        return self.whole.identities()

    def digest(self) -> str:
        """Return that of the whole tensors: all ranks have the same."""
        return self.whole.digest()
