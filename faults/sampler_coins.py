"""Faults of coins: what a right rule is fed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from faults.sampler_fault import SamplerFault
from faults.sampler_types import Change, Draws
from lumotree.errors import InputError
from lumotree.select_types import Step

GRID_BITS = 24


def residual_half(step: Step, draws: Draws) -> Draws:
    """The residual coin is always 0.5."""
    return replace(draws, residual=torch.full_like(draws.residual, 0.5))


def accept_zero(step: Step, draws: Draws) -> Draws:
    """The accept coin is always exactly 0."""
    return replace(draws, accept=torch.zeros_like(draws.accept))


def accept_reused(step: Step, draws: Draws) -> Draws:
    """A row's residual coin is the accept coin of its last child, the one that was refused when it is read."""
    return replace(draws, residual=_of_last_child(step, draws.residual, draws.accept))


def accept_is_draft(step: Step, draws: Draws) -> Draws:
    """The coin that drew a row's token also accepts it. Fixed drafts have no such coin."""
    return draws if step.laws is None else replace(draws, accept=_draft(draws))


def residual_is_draft(step: Step, draws: Draws) -> Draws:
    """A row's residual coin is the draft coin of its last child."""
    if step.laws is None:
        return draws
    return replace(draws, residual=_of_last_child(step, draws.residual, _draft(draws)))


def one_stream_rows(step: Step, draws: Draws) -> Draws:
    """Every row reads the accept and residual coin of the first candidate row."""
    first = step.tree.active_rows[1:2]
    if not first:
        return draws
    return replace(draws, accept=_repeated(draws.accept, first[0]), residual=_repeated(draws.residual, first[0]))


def floor_24_bits(step: Step, draws: Draws) -> Draws:
    """All coins are cut to multiples of 2^-24, as 24-bit uniforms are."""
    return _each(draws, lambda coins: torch.floor(coins * 2**GRID_BITS) / 2**GRID_BITS)


def frozen_generator(step: Step, draws: Draws) -> Draws:
    """Every walk of a call reads the coins of the first: a captured graph whose generator is not registered."""
    return _each(draws, lambda coins: coins[:1].expand_as(coins))


def late_generator(step: Step, draws: Draws) -> Draws:
    """The generator is advanced after every second walk only: each odd walk repeats the coins of the one before."""
    return _each(draws, lambda coins: coins[torch.arange(len(coins)) // 2 * 2])


def fixed_seed(seed: int) -> int:
    """Whatever the request's seed, the engine's is used."""
    return 20_24


def _of_last_child(step: Step, own: Tensor, coins: Tensor) -> Tensor:
    changed = own.clone()
    for row in step.tree.active_rows:
        children = step.tree.active_children(row)
        if children:
            changed[:, row] = coins[:, children[-1]]
    return changed


def _repeated(coins: Tensor, row: int) -> Tensor:
    return coins[:, row : row + 1].expand_as(coins)


def _draft(draws: Draws) -> Tensor:
    if draws.draft is None:
        raise InputError("fault of shared draft coins: the drafts were given without their coins; use `walk`")
    return draws.draft


def _each(draws: Draws, change: object) -> Draws:
    assert callable(change)
    draft = None if draws.draft is None else change(draws.draft)
    return Draws(change(draws.accept), change(draws.residual), draft)


FAULTS = [
    SamplerFault(
        "residual_half",
        "the residual uniform is fixed at 0.5",
        "contract section 6",
        "coins",
        Change(coins=residual_half),
    ),
    SamplerFault(
        "accept_zero",
        "the accept uniform is 0",
        "contract section 6; defect-classes L7",
        "coins",
        Change(coins=accept_zero),
    ),
    SamplerFault(
        "accept_reused",
        "after a refusal, the accept uniform of the child refused last draws the correction token",
        "contract section 6; defect-classes L2 (reuse_u)",
        "coins",
        Change(coins=accept_reused),
    ),
    SamplerFault(
        "accept_is_draft",
        "the draft and the accept test share one noise",
        "defect-classes L1 (shared_noise)",
        "coins",
        Change(coins=accept_is_draft),
        needs="laws",
    ),
    SamplerFault(
        "residual_is_draft",
        "the draft and the correction token share one noise",
        "defect-classes L1 (shared_noise)",
        "coins",
        Change(coins=residual_is_draft),
        needs="laws",
    ),
    SamplerFault(
        "one_stream_rows",
        "all rows of the tree read one stream: the same accept and residual uniform",
        "issue item 6; contract section 6",
        "coins",
        Change(coins=one_stream_rows),
    ),
    SamplerFault(
        "floor_24_bits",
        "uniforms are multiples of 2^-24",
        "defect-classes L6",
        "coins",
        Change(coins=floor_24_bits),
    ),
    SamplerFault(
        "frozen_generator",
        "the generator is not advanced: every walk of a call replays the same numbers",
        "defect-classes L5 (frozen_rng)",
        "coins",
        Change(coins=frozen_generator),
        dependence=True,
    ),
    SamplerFault(
        "late_generator",
        "the generator is advanced after every second walk only",
        "defect-classes L5 (frozen_rng), milder",
        "coins",
        Change(coins=late_generator),
        dependence=True,
    ),
    SamplerFault(
        "fixed_seed",
        "the request's seed is ignored: every request replays one stream",
        "defect-classes L3, L4",
        "coins",
        Change(seed=fixed_seed),
        dependence=True,
    ),
]
