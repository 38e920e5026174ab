"""The cases of the component audit: units of the main shape, small trees and sizes, adversarial and exact-grid ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from audit.cases import SPLITS, CaseSpec
from lumotree.contract import DIMS_27B, DIMS_TINY, Contract, Dims
from lumotree.tree_named import named

#: dk is no power of two, K != V, HV = 3 HK.
DIMS_ODD = Dims(2, 6, 60, 36, 52, 6, 2, 40, 12, name="odd")
#: dk and head_dim are powers of four, so that exact-grid outputs are exact too.
DIMS_EXACT = Dims(2, 6, 16, 20, 44, 4, 2, 64, 16, name="exact")
#: For Triton's interpreter, which costs milliseconds a program and step.
DIMS_MICRO = Dims(1, 3, 8, 12, 20, 2, 1, 16, 4, name="micro")
DIMS_MICRO_EXACT = Dims(1, 3, 16, 12, 20, 2, 1, 64, 16, name="micro-exact")

#: Committed tokens of a main-shape unit: the same for all, so that units are exchangeable.
UNIT_PREFIX = 40


@dataclass(frozen=True)
class Shape:
    """A main shape: its dims, tree, and how many sets and instances a run draws."""

    name: str
    dims: Dims
    tree: str
    sets: int
    instances: int


SHAPES: dict[str, Shape] = {
    "27B": Shape("27B", DIMS_27B, "hydra27", 2, 48),
    "tiny": Shape("tiny", DIMS_TINY, "hydra27", 2, 48),
    "micro": Shape("micro", DIMS_MICRO, "binary:2", 2, 24),
}


def units(
    shape: Shape, split: str, seed: int, *, sets: int | None = None, instances: int | None = None
) -> list[CaseSpec]:
    """Envelope units (set, instance) of a main shape: independent draws, nothing shared between splits."""
    return [
        CaseSpec(
            id=f"{shape.name}/{shape.tree}/{split}/s{s}/i{i}",
            dims=shape.dims,
            trees=(shape.tree,),
            prefixes=(UNIT_PREFIX,),
            entropy=(seed, SPLITS[split], s, i),
            page_size=16,
            unit=True,
            control=i == 0,
            set_index=s,
            instance=i,
        )
        for s in range(shape.sets if sets is None else sets)
        for i in range(shape.instances if instances is None else instances)
    ]


def _two_layers(dims: Dims) -> Dims:
    return replace(dims, layers=2)


def _named(dims: Dims) -> Iterable[tuple[str, dict[str, object]]]:
    for tree in ("hydra27", "mtp5", "chain:9", "star:6", "comb:5", "binary:3"):
        yield (
            f"named/{tree}",
            {"dims": dims, "trees": (tree,), "prefixes": (7,), "control": tree in ("hydra27", "comb:5")},
        )


def _sizes(dims: Dims) -> Iterable[tuple[str, dict[str, object]]]:
    for n in (1, 2, 63, 64, 65):
        yield f"size/{n}", {"dims": dims, "trees": (f"random:{n}",), "prefixes": (3,), "inactive_fraction": 0.1}


def _adversarial(dims: Dims, tree: str) -> Iterable[tuple[str, dict[str, object]]]:
    for regime in ("near_one", "near_zero", "zero_keys", "tiny_keys", "large_gates"):
        yield f"regime/{regime}", {"dims": dims, "trees": (tree,), "prefixes": (5,), "regime": regime}


def _layouts(dims: Dims, trees: tuple[str, str, str]) -> Iterable[tuple[str, dict[str, object]]]:
    yield "start", {"dims": dims, "trees": (trees[1],), "prefixes": (0,)}
    yield "short-prefix", {"dims": dims, "trees": (trees[1],), "prefixes": (1,), "page_size": 16}
    yield "inplace", {"dims": dims, "trees": (trees[1],), "prefixes": (6,), "placement": "inplace"}
    yield "shuffled", {"dims": dims, "trees": (trees[0],), "prefixes": (6,), "placement": "shuffled"}
    yield (
        "batch",
        {
            "dims": _two_layers(dims),
            "trees": trees,
            "prefixes": (17, 2, 33),
            "page_size": 16,
            "padding": 1,
            "control": True,
        },
    )
    yield "batch-inplace", {"dims": dims, "trees": trees, "prefixes": (0, 40, 9), "placement": "inplace"}


def _exact(dims: Dims, trees: tuple[str, ...]) -> Iterable[tuple[str, dict[str, object]]]:
    for tree in trees:
        yield f"exact/{dims.name}/{tree}", {"dims": dims, "trees": (tree,), "prefixes": (9,), "regime": "exact"}


def small_cases(split: str, seed: int) -> list[CaseSpec]:
    """Small trees of every named kind, odd sizes, adversarial regimes, layouts and exact-grid inputs."""
    drawn = [
        *_named(DIMS_TINY),
        *_sizes(DIMS_TINY),
        *_adversarial(DIMS_ODD, "hydra27"),
        *_layouts(DIMS_TINY, ("hydra27", "comb:5", "star:6")),
        ("odd", {"dims": DIMS_ODD, "trees": ("binary:3",), "prefixes": (11,), "control": True}),
        ("reach/tiny", {"dims": DIMS_TINY, "trees": ("chain:12",), "prefixes": (4,), "regime": "near_one"}),
        *_exact(DIMS_EXACT, ("hydra27", "comb:5", "star:6")),
        *_exact(DIMS_27B, ("hydra27",)),
    ]
    return _specs("small", drawn, split, seed)


def micro_cases(split: str, seed: int) -> list[CaseSpec]:
    """The same kinds at sizes that Triton's interpreter finishes in seconds."""
    drawn = [
        *((f"named/{t}", {"dims": DIMS_MICRO, "trees": (t,), "prefixes": (5,)}) for t in ("mtp5", "star:4", "comb:3")),
        ("size/1", {"dims": DIMS_MICRO, "trees": ("chain:1",), "prefixes": (3,)}),
        (
            "size/9",
            {"dims": DIMS_MICRO, "trees": ("random:9",), "prefixes": (3,), "inactive_fraction": 0.3, "control": True},
        ),
        ("odd", {"dims": Dims(1, 3, 60, 20, 20, 2, 1, 16, 4, name="odd"), "trees": ("comb:3",), "prefixes": (4,)}),
        *_adversarial(DIMS_MICRO, "comb:3"),
        *_layouts(DIMS_MICRO, ("comb:3", "star:4", "chain:3")),
        *_exact(DIMS_MICRO_EXACT, ("comb:3",)),
    ]
    return _specs("micro", drawn, split, seed)


def _specs(family: str, drawn: Iterable[tuple[str, dict[str, object]]], split: str, seed: int) -> list[CaseSpec]:
    return [
        CaseSpec(id=f"{family}/{split}/{name}", entropy=(seed, SPLITS[split], 1000 + i), **fields)  # type: ignore[arg-type]
        for i, (name, fields) in enumerate(drawn)
    ]


def fits(spec: CaseSpec, contract: Contract) -> bool:
    """Whether a backend with this contract can be asked to run a case: trees where it takes them, no tree too large."""
    chains = all(t.startswith(("chain:", "mtp")) for t in spec.trees)
    largest = max(max(_rows(t), spec.pad_rows) for t in spec.trees)
    return (contract.trees or chains) and largest <= contract.max_rows


def _rows(tree: str) -> int:
    kind, _, size = tree.partition(":")
    return int(size) if kind == "random" else named(tree).n


def family(
    shape: Shape, split: str, seed: int, sets: int | None = None, instances: int | None = None
) -> list[CaseSpec]:
    """Every case of a run: units first, then the small ones that go with the shape."""
    few = micro_cases if shape.name == "micro" else small_cases
    return [*units(shape, split, seed, sets=sets, instances=instances), *few(split, seed)]


def replayed_cases(shape: Shape, split: str, seed: int) -> list[CaseSpec]:
    """Cases of one size: captured graphs are replayed with other trees, slots, prefixes and accepted lengths.

    Batches of three requests of 32 physical rows each, trees drawn at random or named, padded with inactive rows.
    """
    trees = [("hydra27", "comb:5", "star:6"), *[("random:32", f"random:{8 + 3 * i}", "random:21") for i in range(5)]]
    return [
        CaseSpec(
            id=f"replay/{split}/{i}",
            dims=replace(shape.dims, layers=2),
            trees=names,
            prefixes=(17 + 5 * i, 64 - 7 * i, 3 + i),
            entropy=(seed, SPLITS[split], 3000 + i),
            page_size=16,
            pad_rows=32,
            inactive_fraction=0.2,
            control=False,
        )
        for i, names in enumerate(trees)
    ]
