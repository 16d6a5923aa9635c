"""Layer parts: what ranks that have parts of a layer exchange in its passes.

Pure data. Not known here: the other costs of a layer (`profile`), and ranks.
"""

from dataclasses import astuple, dataclass, replace
from operator import add

from hybridpipe.planning.checks import non_negative, non_negative_int, positive_int


@dataclass(frozen=True, slots=True)
class ExpertsProfile:
    """The experts of a layer, which the replicas of a stage may share (`StageSpec.experts`).

    Args:
        parameter_bytes: of their trained parameters, a part of the layer's.
        share: the part of the layer's seconds that they take.
        token_bytes: that a microbatch sends to all of them together, and that come back.
        tokens: of the microbatch, for each expert of each module.
        replicas: that share them. With several the layer's figures are those of one of these.
        parts: each number of replicas that was tried, and the seconds of one of them beside those of all
            experts, with as many tokens. A number that was not takes as long as all experts.
    """

    parameter_bytes: int
    share: float
    token_bytes: int
    tokens: tuple[tuple[int, ...], ...]
    replicas: int = 1
    parts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        positive_int("replicas", self.replicas)
        for replicas, seconds in self.parts:
            positive_int("parts", replicas)
            non_negative("parts", seconds)
        non_negative_int("parameter_bytes", self.parameter_bytes)
        non_negative_int("token_bytes", self.token_bytes)
        non_negative("share", self.share)
        if self.share > 1:
            raise ValueError(f"share must be a finite number <= 1, got {self.share!r}")
        if not self.tokens or not all(self.tokens):
            raise ValueError("tokens must hold at least one expert of at least one module, got none")
        for count in (count for of_module in self.tokens for count in of_module):
            non_negative_int("tokens", count)

    def scaled(self, factor: float) -> "ExpertsProfile":
        """Return the experts of a microbatch of another size, whose tokens are dealt alike."""
        return self if factor == 1 else replace(self, token_bytes=round(self.token_bytes * factor))

    @property
    def num_modules(self) -> int:
        """The number of modules, each of which exchanges its tokens."""
        return len(self.tokens)

    def are_divided_by(self, replicas: int) -> bool:
        """Return True if each replica gets as many experts of each module."""
        return all(len(of_module) % replicas == 0 for of_module in self.tokens)

    def time_of(self, replicas: int) -> float:
        """Return the seconds of the replica that gets most tokens, beside those of all experts in one."""
        return dict(self.parts).get(replicas, 1.0) * self.imbalance(replicas)

    @property
    def least_time(self) -> float:
        """The least seconds of any number of replicas, beside those of all experts in one."""
        return min((1.0, *(seconds for _, seconds in self.parts)))

    def imbalance(self, replicas: int) -> float:
        """Return the tokens of the replica that gets most, over the mean of all; 1 without tokens."""
        most = 0
        for of_module in self.tokens:
            size = len(of_module) // replicas
            most += max(sum(of_module[i * size : (i + 1) * size]) for i in range(replicas))
        total = sum(map(sum, self.tokens))
        return most * replicas / total if total else 1.0


@dataclass(frozen=True, slots=True)
class SumsProfile:
    """The sums over shards in a microbatch's passes of a layer, or of several.

    Args:
        forward, backward: their number.
        forward_bytes, backward_bytes: of what they sum. What is only joined counts half, as it travels once.
    """

    forward: int = 0
    backward: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "forward_bytes", "backward_bytes"):
            non_negative_int(name, getattr(self, name))

    def __add__(self, other: "SumsProfile") -> "SumsProfile":
        return SumsProfile(*map(add, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> "SumsProfile":
        """Return the sums of a microbatch of another size."""
        sizes = (round(factor * each) for each in (self.forward_bytes, self.backward_bytes))
        return SumsProfile(self.forward, self.backward, *sizes)


NO_SUMS = SumsProfile()
