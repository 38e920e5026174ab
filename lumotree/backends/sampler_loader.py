"""Find a sampler by name, by `module:object` or by entry point, and check that it fits the protocol.

A sampler has one of two methods (see `lumotree.select_types`):

    select(step, tokens, coins) -> Walks     takes its coins: its law can be summed
    walk(step, walks, seed) -> Walks         closed: has a generator (and, for stochastic drafts, a drafter) of its own

and may have attributes that say what it claims, all optional: see `Claims`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from lumotree.backends.loader import check_arguments, import_object
from lumotree.errors import ANYTHING, BackendError, InputError
from lumotree.select import RULES

ENTRY_POINTS = "lumotree_audit.samplers"

#: Built-in name -> `module:object`; the rules of `lumotree.select` are known by their own names.
PEERS: dict[str, str] = {
    "sglang-chain": "lumotree.backends.peer_samplers:SglangChain",
    "sglang-greedy": "lumotree.backends.peer_samplers:SglangGreedy",
    "sglang-tree": "lumotree.backends.peer_samplers:SglangTree",
    "tokenspeed-greedy": "lumotree.backends.peer_samplers:TokenspeedGreedy",
}

DRAFTS = ("fixed", "sampled")

#: Method -> its positional arguments after self.
METHODS: dict[str, str] = {"select": "step, tokens, coins", "walk": "step, walks, seed"}


@dataclass(frozen=True)
class Claims:
    """What a sampler says of itself, each as an attribute of that name; what it does not say is the default.

    rule: the name in `RULES` whose law it follows. drafts: the kinds of drafts that it takes, of "fixed" (point masses)
    and "sampled" (from a declared law). trees: False if siblings are not supported, so that only chains are shown to
    it. duplicates: False if fixed siblings have to differ; otherwise a step holds a sibling that repeats an elder one's
    token, and the elder is followed. vocab: largest vocabulary, walks: most walks in all that it can do in useful time,
    None = no limit.
    """

    rule: str = "multi-round"
    drafts: tuple[str, ...] = DRAFTS
    trees: bool = True
    duplicates: bool = True
    vocab: int | None = None
    walks: int | None = None


@dataclass(frozen=True)
class LoadedSampler:
    """A sampler that fits the protocol. coins: whether it takes them (`select`); otherwise it is closed (`walk`)."""

    spec: str
    sampler: Any
    claims: Claims
    coins: bool


def load_sampler(spec: str) -> LoadedSampler:
    """The sampler named by `spec`: a rule, a peer, an entry point of `lumotree_audit.samplers`, or `module:object`.

    The object may be an instance, a class or a factory without required arguments; modules of the current directory
    can be imported. Raises BackendError when nothing is found, it cannot be made, or it does not fit the protocol.
    """
    sampler = _made(spec, _find(spec))
    methods = [name for name in METHODS if callable(getattr(sampler, name, None))]
    if not methods:
        wanted = " or ".join(f"{name}({arguments})" for name, arguments in METHODS.items())
        raise BackendError(f"sampler {spec!r}: {type(sampler).__name__} lacks a method: write {wanted} -> Walks")
    for name in methods:
        check_arguments(spec, name, getattr(sampler, name), METHODS[name], "sampler")
    return LoadedSampler(spec, sampler, RULE_CLAIMS.get(spec) or _claims(spec, sampler), "select" in methods)


def known_samplers() -> list[str]:
    """Names that `load_sampler` knows: rules, peers and installed entry points."""
    return [*RULES, *sorted({*PEERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})]


#: What the built-in rules claim; their `name` is their rule.
RULE_CLAIMS: dict[str, Claims] = {name: Claims(rule=name) for name in RULES}


def _find(spec: str) -> Any:
    if spec in RULES:
        return RULES[spec]
    if spec in PEERS:
        return import_object(spec, PEERS[spec], "sampler")
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == spec:
            return import_object(spec, point.value, "sampler")
    if ":" not in spec:
        raise BackendError(f"sampler {spec!r} is unknown; known: {', '.join(known_samplers())}; or give module:object")
    return import_object(spec, spec, "sampler")


def _made(spec: str, found: Any) -> Any:
    """Call a class or factory; an instance is taken as it is."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return found
    try:
        return found()
    except InputError:
        raise
    except ANYTHING as error:  # whatever a stranger's constructor raises
        raise BackendError(
            f"sampler {spec!r}: {found.__qualname__} cannot be called: {type(error).__name__}: {error}"
        ) from error


def _claims(spec: str, sampler: Any) -> Claims:
    said = {f.name: getattr(sampler, f.name) for f in fields(Claims) if hasattr(sampler, f.name)}
    if "drafts" in said:
        said["drafts"] = (said["drafts"],) if isinstance(said["drafts"], str) else tuple(said["drafts"])
    claims = Claims(**said)
    if claims.rule not in RULES:
        raise BackendError(f"sampler {spec!r}: expected attribute rule to be one of {', '.join(RULES)}, "
                           f"got rule={claims.rule!r}")  # fmt: skip
    if not claims.drafts or not set(claims.drafts) <= set(DRAFTS):
        raise BackendError(f"sampler {spec!r}: expected attribute drafts to hold fixed, sampled or both, "
                           f"got drafts={claims.drafts!r}")  # fmt: skip
    for name in ("trees", "duplicates"):
        if not isinstance(getattr(claims, name), bool):
            raise BackendError(f"sampler {spec!r}: expected attribute {name} to be True or False, "
                               f"got {getattr(claims, name)!r}")  # fmt: skip
    for name, least in (("vocab", 16), ("walks", 1)):
        value = getattr(claims, name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise BackendError(f"sampler {spec!r}: expected attribute {name} to be an integer >= {least} or None, "
                               f"got {name}={value!r}")  # fmt: skip
    return claims
