"""Position: what this rank is doing. Written at every instruction, read when a report says where."""

from hybridpipe.planning.instructions import Instruction


class _Position:
    stage: int | None = None
    step: int | None = None
    instruction: Instruction | None = None

    def at(self, stage: int, step: int | None, instruction: Instruction) -> None:
        """This instruction starts now; `step` is None in an evaluation."""
        self.stage, self.step, self.instruction = stage, step, instruction

    def outside(self) -> None:
        """The program is done; what follows is the caller's."""
        self.instruction = None

    def __str__(self) -> str:
        if self.instruction is None:
            return "outside a step" if self.step is None else f"outside a step, after step {self.step}"
        microbatch = getattr(self.instruction, "microbatch", None)
        return (
            f"stage {self.stage}, step {'none (evaluation)' if self.step is None else self.step}, "
            f"microbatch {'none' if microbatch is None else microbatch}, instruction {self.instruction}"
        )


position = _Position()
