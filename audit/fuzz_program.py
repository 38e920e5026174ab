"""A program as data: how it is run again, and how it is printed as code that runs by itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from audit.fuzz_driver import Driver
from audit.fuzz_judge import MismatchError
from audit.fuzz_legal import ProgramError
from audit.world import World
from lumotree.errors import InputError

#: One step: method of `Driver`, positional and keyword arguments.
Step = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass
class Program:
    """A world, the steps made in it, and, once it has failed, why."""

    world: World
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    surface: str = ""

    def run(self, backend: Any, reference: Any = None) -> MismatchError | None:
        """Run every step on a fresh driver; what went wrong, or None."""
        with torch.inference_mode():
            driver = Driver(backend, self.world, reference)
        try:
            for name, args, kwargs in self.steps:
                make(driver, name, args, kwargs)
        except MismatchError as wrong:
            return wrong
        return None

    def code(self, spec: str) -> str:
        """A script that shows the failure with an exit code of 1, and prints a line when there is none."""
        lines = [f"kernel, reference = load_backend({spec!r}), load_backend({spec!r})"]
        lines.append(f"d = Driver(kernel, {self._world()}, reference)")
        for name, args, kwargs in self.steps:
            words = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
            lines.append(f"d.{name}({', '.join(words)})")
        return "\n".join(
            [
                f'"""{self.failure}"""' if self.failure else '""""""',
                "",
                "from audit.fuzz_driver import Driver",
                "from audit.world import World",
                "from lumotree.backends.loader import load_backend",
                "",
                *lines,
                'print("every step agrees with sequential decoding")',
                "",
            ]
        )

    def _world(self) -> str:
        default, shown = World(), []
        for f in dataclasses.fields(World):
            value = getattr(self.world, f.name)
            if value != getattr(default, f.name):
                shown.append(f"{f.name}={value!r}")
        return f"World({', '.join(shown)})"


def make(driver: Driver, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make one step, without autograd's bookkeeping, as a serving engine does. A backend that refuses a step of a legal
    program is wrong: MismatchError; ProgramError passes."""
    try:
        with torch.inference_mode():
            getattr(driver, name)(*args, **kwargs)
    except ProgramError:
        raise
    except InputError as refusal:
        raise MismatchError(f"{name} was refused: {refusal}", "refused") from refusal
